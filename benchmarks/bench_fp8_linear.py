"""Benchmark of ``fp8_linear`` at the sizes of DeepSeek-V4-Flash, layers of one input merged."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.fp8_linear import fp8_linear

SHAPES = {
    "wq_a + wkv": (1536, 4096),
    "wq_b + indexer wq_b": (40960, 1024),
    "wq_b": (32768, 1024),
    "wo_b": (4096, 8192),
    "shared w1 + w3": (4096, 4096),
    "shared w2": (4096, 2048),
}
"""Rows and columns of the weights."""


def make_weight(size_n: int, size_k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, weight_sf), random."""
    weight = torch.randn(size_n, size_k, device=device).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return weight, torch.exp2(torch.randint(-14, -8, (-(-size_n // 128), -(-size_k // 128)), device=device).float())


def cases(device: torch.device) -> Iterator[Work]:
    for name, (size_n, size_k) in SHAPES.items():
        weight, weight_sf = make_weight(size_n, size_k, device)
        for num_tokens in (1, 8, 64, 512, 8192):
            x = torch.randn(num_tokens, size_k, dtype=torch.bfloat16, device=device)
            moved = weight.nbytes + x.nbytes + 2 * num_tokens * size_n
            yield Work(
                f"{name} {size_n}x{size_k}, {num_tokens} tokens",
                lambda x=x, weight=weight, weight_sf=weight_sf: fp8_linear(x, weight, weight_sf),
                bytes=moved,
                flops=2 * num_tokens * size_n * size_k,
            )


if __name__ == "__main__":
    main("fp8_linear", cases)
