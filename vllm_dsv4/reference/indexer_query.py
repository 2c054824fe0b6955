"""The indexer's queries: rotate, quantise, fold the scales into the head weights (model.md 3.6, 5.3)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_dsv4.reference.numerics import e8m0_to_float, exponent_to_e8m0, hadamard, quantize_fp8_groups, quantize_mxfp4, row_tiles
from vllm_dsv4.reference.rope import apply_rope

INDEXER_FORMATS = ("fp8", "mxfp4", "rows")


class IndexerQuery(NamedTuple):
    """What ``indexer_topk`` needs of the queries: ``score[t, w] = Σ_h weights[t, h] · relu(q[t, h] · k[w])``.

    q: "fp8": [T, Hi, di] float8_e4m3fn (its scale is in ``weights``); "mxfp4": [T, Hi, di/2] uint8, as in
        ``IndexerMXFP4Format``; "rows": [T, Hi, di] of the model's dtype.
    q_sf: "mxfp4": [T, Hi, di/32] uint8 E8M0; otherwise None.
    weights: [T, Hi] float32, with the factor di^-0.5 · Hi^-0.5.
    """

    q: torch.Tensor
    q_sf: torch.Tensor | None
    weights: torch.Tensor


def indexer_query_ref(
    q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, format: str
) -> IndexerQuery:
    """Rotate ``q`` (no norm), round to its dtype, and quantise as the key cache is.

    Args:
        q: [T, Hi, di] of the model's dtype.
        weights: [T, Hi], the projection of the layer's input, without any factor.
        positions: [T] int64.
        cos_sin_cache: [num_positions, rope_dim] float32, the compressed layers' table.
        format: "fp8" (one scale a head, folded into the weights), "mxfp4" (after the Hadamard rotation) or "rows".

    Raises:
        ValueError: another format.
    """
    if format not in INDEXER_FORMATS:
        raise ValueError(f"indexer_query: format must be one of {INDEXER_FORMATS}, got {format!r}")
    num_heads, head_dim = q.shape[1:]
    rotated = torch.empty_like(q)
    for tile in row_tiles(q.shape[0], num_heads * head_dim):
        rotated[tile] = apply_rope(q[tile].double(), cos_sin_cache[positions[tile]].unsqueeze(1)).to(q.dtype)
        if format == "mxfp4":
            rotated[tile] = hadamard(rotated[tile].double()).to(q.dtype)
    weights = weights.float()
    q_sf = None
    if format == "fp8":
        rotated, exponent = quantize_fp8_groups(rotated, head_dim)
        weights = weights * e8m0_to_float(exponent_to_e8m0(exponent)).squeeze(-1)
    elif format == "mxfp4":
        rotated, q_sf = quantize_mxfp4(rotated)
    return IndexerQuery(rotated, q_sf, weights * head_dim**-0.5 * num_heads**-0.5)
