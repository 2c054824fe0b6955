"""RoPE on vectors that are held as two halves, their even and their odd columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_cos_sin(cos_sin_ptr, position, pair, NOPE_PAIRS: tl.constexpr, ROPE_PAIRS: tl.constexpr):
    """Cosine and sine at ``position`` for the pairs (2 * pair, 2 * pair + 1) of a vector; 1 and 0 outside the rotated part."""
    row = cos_sin_ptr + position.to(tl.int64) * (2 * ROPE_PAIRS)
    turned = pair - NOPE_PAIRS
    mask = (turned >= 0) & (turned < ROPE_PAIRS)
    return tl.load(row + turned, mask=mask, other=1.0), tl.load(row + ROPE_PAIRS + turned, mask=mask, other=0.0)


@triton.jit
def rotate(even, odd, cos, sin):
    """Turn each pair (even, odd); with ``-sin``, back."""
    return even * cos - odd * sin, odd * cos + even * sin
