"""``hc_pre`` on GPUs."""

from __future__ import annotations

import torch

from vllm_dsv4.kernels._hyper_connections import mix


def hc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``reference/hc_pre.py``."""
    mixed = mix(streams, fn, scale, base, rms_eps, hc_eps, sinkhorn_iters)
    assert mixed.post is not None and mixed.comb is not None
    return mixed.x, mixed.post, mixed.comb
