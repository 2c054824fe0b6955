"""Rotary position embedding: the table of cosines and sines, and the rotation (model.md 3.3)."""

from __future__ import annotations

import math

import torch

from vllm_dsv4.config import YarnScaling


def rope_frequencies(theta: float, yarn: YarnScaling | None, rope_dim: int) -> torch.Tensor:
    """Angle per position of each of the ``rope_dim / 2`` pairs, radians → float32, on the CPU (model.md 3.3).

    Evaluated in float32 in the order of the official code, since at a million positions one last bit of a frequency already
    turns the angle by 0.06.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    if yarn is None:
        return frequencies

    def pair_turning(rotations: float) -> float:
        """The (fractional) pair that turns this many times within the original context."""
        return rope_dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), rope_dim - 1)
    span = high - low if high > low else 0.001  # a step instead of a ramp
    keep = 1 - ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return frequencies / yarn.factor * (1 - keep) + frequencies * keep


def build_cos_sin_cache(theta: float, yarn: YarnScaling | None, rope_dim: int, num_positions: int) -> torch.Tensor:
    """``cos_sin_cache`` [num_positions, rope_dim] float32, on the CPU: ``rope_dim / 2`` cosines, then as many sines (model.md 3.3).

    No magnitude factor. The angle is the float32 product of position and frequency, as in every known implementation: the
    model was trained with that rounding, which is visible beyond some ten thousand positions.

    Args:
        theta: ``rope_theta`` for ratio-0 layers, ``compress_rope_theta`` for the others.
        yarn: None for ratio-0 layers.
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), rope_frequencies(theta, yarn, rope_dim))
    cache = torch.empty(num_positions, rope_dim, dtype=torch.float32)  # models are built under another default dtype
    torch.cos(angles, out=cache[:, : rope_dim // 2])
    torch.sin(angles, out=cache[:, rope_dim // 2 :])
    return cache


def apply_rope(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate the interleaved pairs of the last ``rope_dim`` of ``x`` [..., d] (model.md 3.3) → [..., d], at least float32.

    Args:
        x: computed in float64 if it is float64, else in float32.
        cos_sin: rows of ``cos_sin_cache`` [..., rope_dim], broadcast against ``x``'s leading dimensions.
        inverse: rotate back.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    nope, rope = x.split((x.shape[-1] - cos_sin.shape[-1], cos_sin.shape[-1]), dim=-1)
    cos, sin = cos_sin.to(x.dtype).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    even, odd = rope[..., 0::2], rope[..., 1::2]
    return torch.cat((nope, torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)), dim=-1)
