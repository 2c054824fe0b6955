"""Hyper-connection before the head: mix the residual streams into one vector (model.md 3.2)."""

from __future__ import annotations

import torch

from vllm_dsv4.reference.hc_pre import hc_logits


def hc_head_ref(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, rms_eps: float, hc_eps: float
) -> torch.Tensor:
    """streams [T, m, D], fn [m, m·D], scale [1], base [m] (float32) → [T, D] of the streams' dtype, rounded once."""
    pre = torch.sigmoid(scale.double() * hc_logits(streams, fn, rms_eps) + base.double()) + hc_eps
    return (pre.unsqueeze(-1) * streams.double()).sum(1).to(streams.dtype)
