"""The grouped half of the output projection: a matrix for each group of heads (model.md 3.4)."""

from __future__ import annotations

import torch

from vllm_dsv4.reference.numerics import dequantize_block_fp8


def grouped_linear_ref(x: torch.Tensor, weight: torch.Tensor, weight_sf: torch.Tensor | None = None) -> torch.Tensor:
    """``out[t, g] = x[t, g] · weight[g]ᵀ``, with x as it is: block-FP8 weights are widened to x's dtype instead (model.md 5.1).

    Args:
        x: [T, G, K].
        weight: [G, R, K], float8_e4m3fn if there is ``weight_sf``.
        weight_sf: [G, ceil(R/128), ceil(K/128)] float32.

    Returns:
        [T, G, R] of x's dtype, rounded once.
    """
    if weight_sf is not None:
        weight = dequantize_block_fp8(weight, weight_sf).to(x.dtype)
    return torch.einsum("tgk,grk->tgr", x.double(), weight.double()).to(x.dtype)
