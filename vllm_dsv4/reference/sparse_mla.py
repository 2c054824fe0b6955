"""Attention of all heads over one shared KV vector for each attended slot, with a sink (model.md 3.4, 3.7)."""

from __future__ import annotations

import torch

from vllm_dsv4.reference.numerics import gather_entries, row_tiles


def sparse_mla_ref(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    window_slots: torch.Tensor,
    attn_sink: torch.Tensor,
    scale: float,
    entry_cache: torch.Tensor | None = None,
    entry_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """``o[t, h] = Σ_k p[t, h, k] · kv_k`` with ``p = exp(s_k) / (exp(attn_sink[h]) + Σ exp(s))`` and ``s_k = scale · q[t, h] · kv_k``.

    A slot that stands in both lists, or twice in one, counts twice. A token without any slot gives zeros.

    Args:
        q: [T, H, d], normed and rotated.
        window_cache: [num_pages, page_size, entry], packed KV or plain rows; likewise ``entry_cache``.
        window_slots: [T, W] int32, -1 = none; likewise ``entry_slots`` [T, K].
        attn_sink: [H] float32.
        scale: ``d^-0.5``.

    Returns:
        [T, H, d] of q's dtype, rounded once; the rotated part is still rotated.
    """
    out = torch.empty_like(q)
    width = window_slots.shape[1] + (0 if entry_slots is None else entry_slots.shape[1])
    for tile in row_tiles(q.shape[0], width * q.shape[2] // 8):
        kv, present = gather_entries(window_cache, window_slots[tile]), window_slots[tile] >= 0
        if entry_cache is not None and entry_slots is not None:
            kv = torch.cat((kv, gather_entries(entry_cache, entry_slots[tile])), 1)
            present = torch.cat((present, entry_slots[tile] >= 0), 1)
        out[tile] = _attend(q[tile].double(), kv.double(), present, attn_sink.double(), scale).to(q.dtype)
    return out


def _attend(q: torch.Tensor, kv: torch.Tensor, present: torch.Tensor, sink: torch.Tensor, scale: float) -> torch.Tensor:
    """q [T, H, d], kv [T, K, d], present [T, K], sink [H] → [T, H, d]."""
    scores = (q @ kv.transpose(1, 2) * scale).masked_fill(~present.unsqueeze(1), -torch.inf)
    sink = sink[:, None].expand(*scores.shape[:2], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ kv
