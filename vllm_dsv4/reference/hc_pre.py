"""Hyper-connection, before a block: mix the residual streams into the block's input (model.md 3.2)."""

from __future__ import annotations

import torch


def hc_logits(streams: torch.Tensor, fn: torch.Tensor, rms_eps: float) -> torch.Tensor:
    """``fn · f · rsqrt(mean(f²) + rms_eps)`` for the flattened streams f: [T, m, D], fn [N, m·D] → [T, N] float64."""
    flat = streams.double().flatten(1)
    return (flat @ fn.double().T) * (flat.square().mean(-1, keepdim=True) + rms_eps).rsqrt()


def hc_pre_ref(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block's input, and the weights with which ``hc_post`` merges its output.

    Args:
        streams: [T, m, D].
        fn: [(2 + m)·m, m·D] float32; rows are pre, post and mixing weights (row-major m × m), with ``scale`` [3] and ``base``
            [(2 + m)·m].
        rms_eps: of the norm over all m·D values.
        hc_eps: added to the pre weights and in the Sinkhorn normalisation.
        sinkhorn_iters: column normalisations in all; each but the first follows a row normalisation.

    Returns:
        ``x`` [T, D] of the streams' dtype, ``post`` [T, m] and ``comb`` [T, m, m] float32.
    """
    m = streams.shape[1]
    logits, scale, base = hc_logits(streams, fn, rms_eps), scale.double(), base.double()
    pre = torch.sigmoid(scale[0] * logits[:, :m] + base[:m]) + hc_eps
    post = 2 * torch.sigmoid(scale[1] * logits[:, m : 2 * m] + base[m : 2 * m])
    comb = _sinkhorn((scale[2] * logits[:, 2 * m :] + base[2 * m :]).unflatten(-1, (m, m)), hc_eps, sinkhorn_iters)
    x = (pre.unsqueeze(-1) * streams.double()).sum(1)
    return x.to(streams.dtype), post.float(), comb.float()


def _sinkhorn(logits: torch.Tensor, eps: float, iters: int) -> torch.Tensor:
    """Towards a doubly stochastic matrix, ending on columns: [T, m, m] → same."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb
