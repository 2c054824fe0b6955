"""An unquantised linear layer."""

from __future__ import annotations

import torch


def linear_ref(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x · weightᵀ``: x [T, K], weight [N, K] → [T, N] of ``out_dtype`` (default: x's dtype), rounded once."""
    return (x.double() @ weight.double().T).to(out_dtype or x.dtype)
