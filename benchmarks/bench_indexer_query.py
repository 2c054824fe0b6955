"""Benchmark of ``indexer_query``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.indexer_query import indexer_query


def cases(device: torch.device) -> Iterator[Work]:
    angle = torch.rand(8192, 32, device=device) * 6
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1)
    for format, entry in (("fp8", 128), ("mxfp4", 68)):
        for num_tokens in (1, 64, 8192):
            q = torch.randn(num_tokens, 64, 128, dtype=torch.bfloat16, device=device)
            weights = torch.randn(num_tokens, 64, dtype=torch.bfloat16, device=device)
            positions = torch.randint(0, 8192, (num_tokens,), device=device)
            yield Work(
                f"{format}, {num_tokens} tokens",
                lambda q=q, weights=weights, positions=positions, format=format: indexer_query(q, weights, positions, cos_sin, format),
                bytes=num_tokens * 64 * (2 * 128 + entry + 6),
            )


if __name__ == "__main__":
    main("indexer_query", cases)
