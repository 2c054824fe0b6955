"""The grouped half of the output projection: a matrix for each group of heads (model.md 3.4)."""

from __future__ import annotations

import torch


def grouped_linear_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``out[t, g] = x[t, g] · weight[g]ᵀ``: x [T, G, K], weight [G, R, K] → [T, G, R] of x's dtype, rounded once."""
    return torch.einsum("tgk,grk->tgr", x.double(), weight.double()).to(x.dtype)
