"""Benchmark of ``linear`` at the sizes of DeepSeek-V4-Flash, layers of one input merged."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.linear import linear

SHAPES = {
    "gate": (256, 4096, torch.float32),
    "compressor, ratio 4, and indexer's": (2560, 4096, torch.float32),
    "compressor, ratio 128": (1024, 4096, torch.float32),
    "indexer weights_proj": (64, 4096, None),
    "head": (129280, 4096, torch.float32),
}
"""Rows and columns of the weights, and the type of the result (None: the input's)."""


def cases(device: torch.device) -> Iterator[Work]:
    for name, (size_n, size_k, out_dtype) in SHAPES.items():
        weight = torch.randn(size_n, size_k, dtype=torch.bfloat16, device=device)
        # The head computes the logits of the last token of each request only.
        for num_tokens in (1, 8, 64, 512) if name == "head" else (1, 8, 64, 512, 8192):
            x = torch.randn(num_tokens, size_k, dtype=torch.bfloat16, device=device)
            out_bytes = 4 if out_dtype else 2
            yield Work(
                f"{name} {size_n}x{size_k}, {num_tokens} tokens",
                lambda x=x, weight=weight, out_dtype=out_dtype: linear(x, weight, out_dtype),
                bytes=weight.nbytes + x.nbytes + out_bytes * num_tokens * size_n,
                flops=2 * num_tokens * size_n * size_k,
            )


if __name__ == "__main__":
    main("linear", cases)
