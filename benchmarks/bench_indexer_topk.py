"""Benchmark of ``indexer_topk``: 512 entries for each token, block tables for a million tokens of context."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.indexer_query import indexer_query
from vllm_dsv4.kernels.indexer_topk import indexer_topk
from vllm_dsv4.reference.indexer_query import IndexerQuery
from vllm_dsv4.reference.numerics import hadamard, scatter_entries

_PAGE_SIZE = 64
_ENTRY_BYTES = {"fp8": 132, "mxfp4": 68}


def make_cache(format: str, num_pages: int, device: torch.device) -> torch.Tensor:
    entry = _ENTRY_BYTES[format]
    stride = -(-entry * _PAGE_SIZE // 576) * 576
    cache = torch.zeros(num_pages, stride, dtype=torch.uint8, device=device)[:, : entry * _PAGE_SIZE].unflatten(1, (_PAGE_SIZE, entry))
    keys = torch.randn(num_pages * _PAGE_SIZE, 128, device=device).bfloat16()
    for rows in torch.arange(len(keys), device=device).split(1 << 15):
        values = hadamard(keys[rows].double()).bfloat16() if format == "mxfp4" else keys[rows]
        scatter_entries(cache, rows, values)
    return cache


def make_query(format: str, num_tokens: int, device: torch.device) -> IndexerQuery:
    q = torch.randn(num_tokens, 64, 128, dtype=torch.bfloat16, device=device)
    weights = torch.randn(num_tokens, 64, dtype=torch.bfloat16, device=device)
    positions, no_turn = torch.zeros(num_tokens, dtype=torch.long, device=device), torch.tensor([[1.0] * 32 + [0.0] * 32], device=device)
    return indexer_query(q, weights, positions, no_turn, format)


def cases(device: torch.device) -> Iterator[Work]:
    decode = [(1, 500), (1, 1000), (64, 1000), (1, 8192), (1, 32_768), (8, 32_768), (1, 262_144)]
    for format, lengths in (("fp8", decode), ("mxfp4", [(1, 1000), (1, 262_144)])):
        cache = make_cache(format, 4096, device)
        for num_tokens, length in lengths:
            query = make_query(format, num_tokens, device)
            table = torch.stack([torch.randperm(4096, device=device) for _ in range(num_tokens)]).int()
            request = torch.arange(num_tokens, dtype=torch.int32, device=device)
            counts = torch.full((num_tokens,), length, dtype=torch.int32, device=device)
            yield Work(
                f"{format}, {num_tokens} tokens, {length} entries",
                lambda query=query, cache=cache, table=table, request=request, counts=counts: indexer_topk(
                    query, cache, table, request, counts, 512
                ),
                bytes=num_tokens * length * _ENTRY_BYTES[format],
            )
        for first, num_tokens, num_blocks in ((0, 8192, 4096), (0, 8192, 32), (122_880, 8192, 4096)):
            query = make_query(format, num_tokens, device)
            table = torch.randperm(4096, device=device).int()[:num_blocks].view(1, -1)
            request = torch.zeros(num_tokens, dtype=torch.int32, device=device)
            counts = ((torch.arange(num_tokens, device=device) + first + 1) // 4).int()
            yield Work(
                f"{format}, {num_tokens} tokens of prefill from {first}, {num_blocks} blocks",
                lambda query=query, cache=cache, table=table, request=request, counts=counts: indexer_topk(
                    query, cache, table, request, counts, 512
                ),
                flops=2 * 64 * 128 * int(counts[counts > 512].sum()),
            )


if __name__ == "__main__":
    main("indexer_topk", cases)
