"""Benchmark of ``swiglu``, at the shared expert's size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.swiglu import swiglu


def cases(device: torch.device) -> Iterator[Work]:
    for num_tokens in (1, 8, 64, 8192):
        gate, up = torch.randn(num_tokens, 4096, dtype=torch.bfloat16, device=device).chunk(2, 1)
        run = lambda gate=gate, up=up: swiglu(gate, up, 10.0, torch.bfloat16)  # noqa: E731
        yield Work(f"{num_tokens} tokens x 2048", run, bytes=num_tokens * 2048 * 6)


if __name__ == "__main__":
    main("swiglu", cases)
