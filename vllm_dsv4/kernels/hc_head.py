"""``hc_head`` on GPUs."""

from __future__ import annotations

import torch

from vllm_dsv4.kernels._hyper_connections import mix


def hc_head(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, rms_eps: float, hc_eps: float
) -> torch.Tensor:
    """See ``reference/hc_head.py``."""
    return mix(streams, fn, scale, base, rms_eps, hc_eps).x
