"""Undo RoPE on the attention output: V carries the keys' rotation (model.md 3.4)."""

from __future__ import annotations

import torch

from vllm_dsv4.reference.numerics import row_tiles
from vllm_dsv4.reference.rope import apply_rope


def inverse_rope_ref(
    x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotate the last ``rope_dim`` of every head back by the query's position.

    Args:
        x: [T, H, d], any float dtype.
        positions: [T] int64.
        cos_sin_cache: [num_positions, rope_dim] float32.
        out: where the result goes, None = a new tensor; ``x`` itself saves the copy of what is not rotated.

    Returns:
        ``out`` [T, H, d] of ``x``'s dtype, rounded once.
    """
    if out is None:
        out = torch.empty_like(x)
    for tile in row_tiles(x.shape[0], x.shape[1:].numel()):
        out[tile] = apply_rope(x[tile].double(), cos_sin_cache[positions[tile]].unsqueeze(1), inverse=True).to(x.dtype)
    return out
