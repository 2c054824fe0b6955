"""Hyper-connection, after a block: merge its output into the residual streams (model.md 3.2)."""

from __future__ import annotations

import torch


def hc_post_ref(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """``streams'[j] = post[j] · x + Σ_i comb[i, j] · streams[i]``: the sum runs over the FIRST index of ``comb``.

    Args:
        x: [T, D], the block's output.
        streams: [T, m, D].
        post: [T, m] float32.
        comb: [T, m, m] float32.

    Returns:
        [T, m, D] of the streams' dtype, rounded once.
    """
    mixed = comb.double().transpose(1, 2) @ streams.double()
    return (post.double().unsqueeze(-1) * x.double().unsqueeze(1) + mixed).to(streams.dtype)
