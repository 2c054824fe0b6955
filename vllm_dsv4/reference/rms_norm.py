"""RMSNorm (model.md 3.1)."""

from __future__ import annotations

import torch

from vllm_dsv4.reference.numerics import rms_normalize


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x · rsqrt(mean(x²) + eps) · weight`` over the last dimension: x [T, D], weight [D] → [T, D] of x's dtype, rounded once."""
    return (rms_normalize(x.double(), eps) * weight.double()).to(x.dtype)
