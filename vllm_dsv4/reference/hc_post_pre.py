"""Hyper-connection between two blocks: after one, before the next, and the norm of the next (model.md 3.1, 3.2)."""

from __future__ import annotations

import torch

from vllm_dsv4.reference.hc_post import hc_post_ref
from vllm_dsv4.reference.hc_pre import hc_pre_ref
from vllm_dsv4.reference.rms_norm import rms_norm_ref


def hc_post_pre_ref(
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
    """``hc_post``, ``hc_pre`` and ``rms_norm`` one after the other, each rounding its result.

    Args:
        x: [T, D], the block's output, with ``streams`` [T, m, D], ``post`` [T, m] and ``comb`` [T, m, m], as for ``hc_post``.
        fn: of the next block, with ``scale``, ``base``, ``hc_eps`` and ``sinkhorn_iters``, as for ``hc_pre``.
        norm_weight: [D], of the next block's norm.
        rms_eps: of both norms.

    Returns:
        The streams after the merge, the next block's normed input [T, D] of their dtype, and its ``post`` and ``comb``.
    """
    streams = hc_post_ref(x, streams, post, comb)
    x, post, comb = hc_pre_ref(streams, fn, scale, base, rms_eps, hc_eps, sinkhorn_iters)
    return streams, rms_norm_ref(x, norm_weight, rms_eps), post, comb
