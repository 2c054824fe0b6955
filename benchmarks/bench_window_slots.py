"""Benchmark of ``window_slots``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.window_slots import window_slots


def cases(device: torch.device) -> Iterator[Work]:
    for num_tokens in (1, 64, 8192):
        request = torch.arange(num_tokens, dtype=torch.int32, device=device) % 64
        table = torch.randint(0, 1 << 16, (64, 4096), dtype=torch.int32, device=device)
        positions = torch.randint(0, 1 << 18, (num_tokens,), device=device)
        yield Work(
            f"{num_tokens} tokens",
            lambda positions=positions, request=request, table=table: window_slots(positions, request, table, 128, 64),
            bytes=num_tokens * 128 * 4,
        )


if __name__ == "__main__":
    main("window_slots", cases)
