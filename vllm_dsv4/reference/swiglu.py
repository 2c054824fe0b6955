"""The clamped SwiGLU activation (model.md 4)."""

from __future__ import annotations

import torch
from torch.nn.functional import silu


def swiglu_ref(
    gate: torch.Tensor, up: torch.Tensor, limit: float, out_dtype: torch.dtype, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """``silu(min(gate, limit)) · clamp(up, -limit, limit) · weights``: [T, I] each, weights [T] → [T, I], rounded once.

    ``limit`` 0 clamps nothing. The gate has no lower bound.
    """
    gate, up = gate.double(), up.double()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out = silu(gate) * up
    if weights is not None:
        out = out * weights.double().unsqueeze(-1)
    return out.to(out_dtype)
