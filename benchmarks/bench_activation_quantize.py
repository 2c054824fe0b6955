"""Benchmark of ``activation_quantize``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.activation_quantize import activation_quantize


def cases(device: torch.device) -> Iterator[Work]:
    for num_tokens in (1, 64, 8192):
        x = torch.randn(num_tokens, 4096, dtype=torch.bfloat16, device=device)
        yield Work(f"{num_tokens} tokens x 4096", lambda x=x: activation_quantize(x), bytes=x.numel() * 3 + x.numel() // 32)


if __name__ == "__main__":
    main("activation_quantize", cases)
