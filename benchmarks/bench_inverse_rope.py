"""Benchmark of ``inverse_rope``: 64 heads, to a new tensor and in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.inverse_rope import inverse_rope

_HEADS = 64
_DIM = 512
_ROPE_DIM = 64


def cases(device: torch.device) -> Iterator[Work]:
    cos_sin = torch.randn(1 << 16, _ROPE_DIM, device=device)
    for num_tokens in (1, 64, 4096, 8192):
        x = torch.randn(num_tokens, _HEADS, _DIM, dtype=torch.bfloat16, device=device)
        positions = torch.arange(num_tokens, device=device)
        for in_place in (False, True):
            out = x if in_place else None
            yield Work(
                f"{num_tokens} tokens x {_HEADS} heads x {_DIM}{', in place' if in_place else ''}",
                lambda x=x, positions=positions, out=out: inverse_rope(x, positions, cos_sin, out=out),
                bytes=num_tokens * (4 * _HEADS * (_ROPE_DIM if in_place else _DIM) + 4 * _ROPE_DIM),
            )


if __name__ == "__main__":
    main("inverse_rope", cases)
