"""Benchmark of ``sparse_mla``: 64 heads, a window of 128 and the selected entries of ratio 4, or all of ratio 128."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.sparse_mla import sparse_mla
from vllm_dsv4.reference.numerics import scatter_entries

_HEADS = 64


def make_cache(num_pages: int, page_size: int, device: torch.device) -> torch.Tensor:
    """A packed cache of random entries, in pages as vLLM aligns them."""
    page_bytes = -(-page_size * 584 // 576) * 576
    storage = torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device)
    cache = storage[:, : page_size * 584].unflatten(1, (page_size, 584))
    for slots in torch.arange(num_pages * page_size, device=device).split(1 << 16):
        scatter_entries(cache, slots, torch.randn(len(slots), 512, device=device).bfloat16())
    return cache


def cases(device: torch.device) -> Iterator[Work]:
    window_cache, entry_cache, small_pages = make_cache(256, 256, device), make_cache(2048, 64, device), make_cache(32768, 2, device)
    sink = torch.randn(_HEADS, device=device)
    shapes = [(1, 512, 512, 64), (8, 512, 512, 64), (64, 512, 512, 64), (256, 512, 512, 64), (8192, 512, 512, 64)]
    shapes += [(1, 8192, 8192, 2), (64, 8192, 64, 2), (64, 64, 64, 2), (64, 0, 0, 64)]
    for num_tokens, width, present, page_size in shapes:
        q = torch.randn(num_tokens, _HEADS, 512, device=device).bfloat16()
        window_slots = torch.randint(0, 65536, (num_tokens, 128), dtype=torch.int32, device=device)
        entry_slots = torch.randint(0, 65536, (num_tokens, width), dtype=torch.int32, device=device)
        entry_slots[:, present:] = -1
        cache = entry_cache if page_size == 64 else small_pages
        yield Work(
            f"{num_tokens} tokens, 128 + {present} of {width} columns",
            lambda q=q, window_slots=window_slots, entry_slots=entry_slots, cache=cache: sparse_mla(
                q, window_cache, window_slots, sink, 512**-0.5, entry_cache=cache, entry_slots=entry_slots
            ),
            bytes=num_tokens * ((128 + present) * 584 + 2 * _HEADS * 512 * 2),
            flops=num_tokens * (128 + present) * _HEADS * 512 * 4,
        )


if __name__ == "__main__":
    main("sparse_mla", cases)
