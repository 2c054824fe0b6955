"""Benchmark of ``norm_rope_insert``: 64 heads, column slices of the merged products, packed window cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.norm_rope_insert import norm_rope_insert
from vllm_dsv4.quantization.formats import PACKED_KV, WINDOW_BLOCK_SIZE

_HEADS = 64
_DIM = 512


def cases(device: torch.device) -> Iterator[Work]:
    cos_sin = torch.randn(1 << 16, 64, device=device)
    weight = torch.randn(_DIM, device=device).bfloat16()
    for num_tokens in (1, 64, 4096, 8192):
        up = torch.randn(num_tokens, _HEADS * _DIM + 8192, dtype=torch.bfloat16, device=device)
        q = up[:, : _HEADS * _DIM].unflatten(1, (_HEADS, _DIM))
        kv = torch.randn(num_tokens, 1536, dtype=torch.bfloat16, device=device)[:, 1024:]
        num_pages = num_tokens // WINDOW_BLOCK_SIZE + 1
        storage = torch.randint(256, (num_pages, PACKED_KV.page_bytes(WINDOW_BLOCK_SIZE)), dtype=torch.uint8, device=device)
        cache = storage[:, : WINDOW_BLOCK_SIZE * PACKED_KV.entry_bytes].unflatten(1, (WINDOW_BLOCK_SIZE, PACKED_KV.entry_bytes))
        positions = torch.arange(num_tokens, device=device)
        slots = torch.randperm(num_pages * WINDOW_BLOCK_SIZE, device=device)[:num_tokens]
        yield Work(
            f"{num_tokens} tokens x {_HEADS} heads x {_DIM}",
            lambda q=q, kv=kv, positions=positions, cache=cache, slots=slots: norm_rope_insert(
                q, kv, weight, positions, cos_sin, 1e-6, cache, slots
            ),
            bytes=num_tokens * (4 * _HEADS * _DIM + 2 * _DIM + PACKED_KV.entry_bytes + 256),
        )


if __name__ == "__main__":
    main("norm_rope_insert", cases)
