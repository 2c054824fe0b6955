"""Attention of all heads over one shared KV vector for each attended slot, with a sink (model.md 3.4, 3.7)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vllm_dsv4.reference.numerics import gather_entries, row_tiles

# Slots of a token that are gathered together. Fixed, so that a token's sums are split alike in every batch.
_SLOT_TILE = 512


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

    A slot that stands in both lists, or twice in one, counts twice. A token without any slot gives zeros. Scratch memory does
    not grow with the number of slots.

    Args:
        q: [T, H, d], normed and rotated.
        window_cache: [num_pages, page_size, entry], packed KV or plain rows; likewise ``entry_cache``.
        window_slots: [T, W] int32, -1 = none; likewise ``entry_slots`` [T, K].
        attn_sink: [H] float32; -inf is no sink, +inf leaves nothing.
        scale: ``d^-0.5``.

    Returns:
        [T, H, d] of q's dtype, rounded once; the rotated part is still rotated.
    """
    out = torch.empty_like(q)
    lists = [(window_cache, window_slots)]
    if entry_cache is not None and entry_slots is not None:
        lists.append((entry_cache, entry_slots))
    sink = attn_sink.double().nan_to_num(nan=torch.nan)  # finite, so that inf - inf cannot occur
    for tokens in row_tiles(q.shape[0], _SLOT_TILE * q.shape[2] // 4):
        parts = ((cache, part) for cache, slots in lists for part in slots[tokens].split(_SLOT_TILE, dim=1) if part.shape[1])
        out[tokens] = _attend(q[tokens].double(), parts, sink, scale).to(q.dtype)
    return out


def _attend(q: torch.Tensor, parts: Iterable[tuple[torch.Tensor, torch.Tensor]], sink: torch.Tensor, scale: float) -> torch.Tensor:
    """q [T, H, d], parts (cache, slots [T, K]), sink [H] → [T, H, d]: a softmax that is rescaled whenever a larger score comes."""
    largest = sink[:, None].expand(*q.shape[:2], 1)
    total = torch.ones_like(largest)
    out = torch.zeros_like(q)
    for cache, slots in parts:
        kv = _gather(cache, slots)
        scores = (q @ kv.transpose(1, 2) * scale).masked_fill((slots < 0).unsqueeze(1), -torch.inf)
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        shrink, weights = (before - largest).exp(), (scores - largest).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ kv
    return out / total


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Entries [*slots.shape, d] float64. Neighbouring tokens attend to much the same slots: each is decoded once."""
    unique, inverse = slots.unique(return_inverse=True)
    return gather_entries(cache, unique).double()[inverse]
