"""Where float32 leaves a rounding open: a kernel that computes in float32 may fall to the other side of a tie.

An ``Interval`` follows the exact value, in float64, and a bound on float32's error through the steps that make a cache entry.
Where both ends round to the same number that number is decided, and a kernel must give it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tolerances import INTERPRETED, RELATIVE_NORM, is_kernel_output

from vllm_dsv4.quantization.formats import CacheFormat
from vllm_dsv4.reference.numerics import round_trip_entries

_STEP = 2.0**-21
"""Relative error of a few operations in float32."""


@dataclass(frozen=True)
class Interval:
    """``center`` ± ``radius``: entries [N, d] float64, on the CPU."""

    center: torch.Tensor
    radius: torch.Tensor

    def rounded(self, dtype: torch.dtype) -> Interval:
        low, high = ((self.center + sign * self.radius).to(dtype).double() for sign in (-1, 1))
        return Interval((low + high) / 2, (high - low) / 2)

    def normed(self, weight: torch.Tensor, eps: float) -> Interval:
        square = self.center.square()
        scale = (square.mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
        of_norm = (self.center.abs() * self.radius).sum(-1, keepdim=True) / square.sum(-1, keepdim=True).clamp(min=1e-300)
        return Interval(self.center * scale, (self.radius + (of_norm + _STEP) * self.center.abs()) * scale.abs())

    def rotated(self, cos_sin: torch.Tensor) -> Interval:
        """``cos_sin`` [N, rope_dim]."""
        nope = self.center.shape[-1] - cos_sin.shape[-1]
        cos, sin = cos_sin.double().chunk(2, -1)
        even, odd = self.center[:, nope::2], self.center[:, nope + 1 :: 2]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
        # Cancellation: the error is relative to the pair.
        error = _STEP * torch.hypot(even, odd)
        even, odd = self.radius[:, nope::2], self.radius[:, nope + 1 :: 2]
        cos, sin = cos.abs(), sin.abs()
        radius = torch.stack((even * cos + odd * sin + error, odd * cos + even * sin + error), -1).flatten(-2)
        return Interval(torch.cat((self.center[:, :nope], turned), -1), torch.cat((self.radius[:, :nope], radius), -1))

    def times(self, matrix: torch.Tensor) -> Interval:
        return Interval(self.center @ matrix, (self.radius + _STEP * self.center.abs()) @ matrix.abs())


def assert_entries(values: torch.Tensor, expected: torch.Tensor, interval: Interval, fmt: CacheFormat) -> None:
    """``values``: entries read from a cache; ``expected``: exact ones [N, d] of ``fmt.value_dtype``; ``interval``: before that rounding.

    A reference op must give ``expected``. A kernel must where it is decided, and elsewhere come within the interval; float32
    rows are not rounded further, so that little is decided.
    """
    from_kernel = is_kernel_output(values)
    values, expected = values.cpu(), round_trip_entries(expected.cpu(), fmt)
    if not from_kernel:
        assert torch.equal(values, expected)
    elif fmt.value_dtype == torch.float32:
        assert (values - expected).norm() <= RELATIVE_NORM[torch.float32] * expected.norm()
    elif INTERPRETED:  # bfloat16 towards zero: one number in sixteen moves by a step of E4M3
        assert not values.isnan().any() and (values - expected).norm() <= 0.1 * expected.norm()
    else:
        lower, upper = (round_trip_entries((interval.center + sign * interval.radius).to(fmt.value_dtype), fmt) for sign in (-1, 1))
        assert ((torch.minimum(lower, upper) <= values) & (values <= torch.maximum(lower, upper))).all()
        assert not ((values != expected) & (lower == upper)).any()
        assert (values != expected).float().mean() < 5e-3
