"""Benchmark of ``hc_post_pre``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.hc_post_pre import hc_post_pre

M, WIDTH = 4, 4096


def make_block(num_tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x, streams, post and comb."""
    x, streams = (torch.randn(num_tokens, *shape, dtype=torch.bfloat16, device=device) for shape in ((WIDTH,), (M, WIDTH)))
    return x, streams, torch.rand(num_tokens, M, device=device) * 2, torch.rand(num_tokens, M, M, device=device) / M


def make_parameters(rows: int, num_scales: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """fn, scale and base."""
    fn = torch.randn(rows, M * WIDTH, device=device) * (M * WIDTH) ** -0.5
    return fn, torch.rand(num_scales, device=device), torch.randn(rows, device=device)


def cases(device: torch.device) -> Iterator[Work]:
    parameters = make_parameters((2 + M) * M, 3, device)
    norm_weight = torch.randn(WIDTH, dtype=torch.bfloat16, device=device)
    for num_tokens in (1, 8, 64, 512, 8192):
        block = make_block(num_tokens, device)
        yield Work(
            f"{num_tokens} tokens x {M} x {WIDTH}",
            lambda block=block: hc_post_pre(*block, *parameters, norm_weight, 1e-6, 1e-6, 20),
            bytes=num_tokens * (2 * M + 2) * WIDTH * 2 + parameters[0].nbytes,
        )


if __name__ == "__main__":
    main("hc_post_pre", cases)
