"""Dynamic FP8 quantisation of a linear layer's input (model.md 5.1)."""

from __future__ import annotations

import torch

from vllm_dsv4.reference.numerics import e8m0_to_float, exponent_to_e8m0, quantize_fp8_groups


def activation_quantize_ref(x: torch.Tensor, group_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Per token and group of ``group_size`` columns: ``s = 2^ceil(log2(max(amax, 1e-4) / 448))``, ``q = e4m3(x / s)``.

    Args:
        x: [T, K] bfloat16, float16 or float32.
        group_size: columns that share a scale; divides K.

    Returns:
        ``(q [T, K] float8_e4m3fn, sf [T, K / group_size] float32)``, x ≈ q · sf. The scale of a group with an infinity or a
        NaN is NaN.

    Raises:
        ValueError: ``group_size`` does not divide K.
    """
    if x.shape[-1] % group_size:
        raise ValueError(f"activation_quantize: group_size must divide the {x.shape[-1]} columns of x, got {group_size}")
    q, exponent = quantize_fp8_groups(x, group_size)
    return q, e8m0_to_float(exponent_to_e8m0(exponent))
