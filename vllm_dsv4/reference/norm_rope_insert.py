"""Norm and rotate queries and the KV vector, and write the latter to the window cache (model.md 3.4)."""

from __future__ import annotations

import torch

from vllm_dsv4.quantization.formats import cache_format
from vllm_dsv4.reference.numerics import rms_normalize, row_tiles, scatter_entries
from vllm_dsv4.reference.rope import apply_rope


def norm_rope_insert_ref(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_norm_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """``q' = rope(q / rms(q))`` per head without weight; ``cache[slot] = quantise(rope(rmsnorm(kv, kv_norm_weight)))``.

    Args:
        q: [T, H, d], any float dtype; not changed.
        kv: [T, d].
        kv_norm_weight: [d].
        positions: [T] int64.
        cos_sin_cache: [num_positions, rope_dim] float32.
        eps: ``rms_norm_eps``.
        cache: window cache [num_pages, page_size, entry], packed KV or plain rows.
        slot_mapping: [T] int64, -1 = do not write.

    Returns:
        q' [T, H, d] of ``q``'s dtype, rounded once (model.md 5.4). The KV vector is rounded to the cache's value dtype after
        the norm and after the rotation.
    """
    out = torch.empty_like(q)
    for tile in row_tiles(q.shape[0], q.shape[1:].numel()):
        normed = rms_normalize(q[tile].double(), eps)
        out[tile] = apply_rope(normed, cos_sin_cache[positions[tile]].unsqueeze(1)).to(q.dtype)
    dtype = cache_format(cache.dtype, cache.shape[-1]).value_dtype
    normed = (rms_normalize(kv.double(), eps) * kv_norm_weight.double()).to(dtype)
    scatter_entries(cache, slot_mapping, apply_rope(normed.double(), cos_sin_cache[positions]).to(dtype))
    return out
