"""Benchmark of ``entry_slots``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.entry_slots import entry_slots


def cases(device: torch.device) -> Iterator[Work]:
    for num_tokens in (1, 64, 8192):
        request = torch.arange(num_tokens, dtype=torch.int32, device=device) % 64
        table = torch.randint(0, 1 << 16, (64, 1024), dtype=torch.int32, device=device)
        count = torch.full((num_tokens,), 1024 * 64, dtype=torch.int32, device=device)
        indices = torch.randint(0, 1024 * 64, (num_tokens, 512), dtype=torch.int32, device=device)
        yield Work(
            f"{num_tokens} tokens, 512 selected of 65536",
            lambda count=count, request=request, table=table, indices=indices: entry_slots(count, request, table, 64, topk_indices=indices),
            bytes=indices.nbytes * 2,
        )
        yield Work(
            f"{num_tokens} tokens, all of 1024",
            lambda count=count, request=request, table=table: entry_slots(count, request, table, 2, width=1024),
            bytes=num_tokens * 1024 * 4,
        )


if __name__ == "__main__":
    main("entry_slots", cases)
