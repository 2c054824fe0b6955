"""Benchmark of ``rms_norm``: the layers' norms, and the query's."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.rms_norm import rms_norm


def cases(device: torch.device) -> Iterator[Work]:
    for width in (4096, 1024):
        weight = torch.randn(width, dtype=torch.bfloat16, device=device)
        for num_tokens in (1, 64, 8192):
            # The query's norm reads a column slice of a merged product.
            x = torch.randn(num_tokens, width + 512, dtype=torch.bfloat16, device=device)[:, :width]
            yield Work(
                f"{num_tokens} tokens x {width}",
                lambda x=x, weight=weight: rms_norm(x, weight, 1e-6),
                bytes=4 * num_tokens * width,
            )


if __name__ == "__main__":
    main("rms_norm", cases)
