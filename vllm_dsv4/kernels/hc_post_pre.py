"""``hc_post_pre`` on GPUs."""

from __future__ import annotations

import torch

from vllm_dsv4.kernels._hyper_connections import BlockOutput, mix


def hc_post_pre(
    x: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``reference/hc_post_pre.py``."""
    mixed = mix(streams, fn, scale, base, rms_eps, hc_eps, sinkhorn_iters, BlockOutput(x, post, comb), norm_weight)
    assert mixed.post is not None and mixed.comb is not None
    return mixed.streams, mixed.x, mixed.post, mixed.comb
