"""A block-FP8 linear layer on dynamically quantised activations (model.md 2.1, 5.1)."""

from __future__ import annotations

import torch

from vllm_dsv4.reference.numerics import dequantize_block_fp8, fp8_round_trip


def fp8_linear_ref(x: torch.Tensor, weight: torch.Tensor, weight_sf: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Quantise x in groups of 128 along K, multiply the dequantised operands.

    In float64 each product of two E4M3 values and their scales is exact, so this is the value that every order of summation
    approximates.

    Args:
        x: [T, K], K any size (a last group may be short).
        weight: [N, K] float8_e4m3fn.
        weight_sf: [ceil(N/128), ceil(K/128)] float32.
        out_dtype: default x's dtype.

    Returns:
        [T, N], rounded once.
    """
    return (fp8_round_trip(x) @ dequantize_block_fp8(weight, weight_sf, torch.float64).T).to(out_dtype or x.dtype)
