"""Benchmark of ``completed_entries``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.completed_entries import completed_entries


def cases(device: torch.device) -> Iterator[Work]:
    block_table = torch.randperm(4096, device=device).int().view(1, -1)
    for num_tokens in (1, 64, 8192):
        positions = torch.arange(num_tokens, device=device) + 1000
        requests = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        run = lambda p=positions, r=requests: completed_entries(p, p, r, block_table, 4, 64)  # noqa: E731
        yield Work(f"{num_tokens} tokens", run, bytes=32 * num_tokens)


if __name__ == "__main__":
    main("completed_entries", cases)
