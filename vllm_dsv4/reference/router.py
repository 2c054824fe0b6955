"""Choice and weights of the routed experts (model.md 4)."""

from __future__ import annotations

import torch


def router_ref(
    logits: torch.Tensor,
    topk: int,
    routed_scaling_factor: float,
    bias: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``score = sqrt(softplus(logits))``; the experts of the ``topk`` largest ``score + bias``, or of the token's row of a table.

    Weights are the scores over their sum and 1e-20, as in transformers: all 0 rather than NaN where every chosen score vanishes.

    Args:
        logits: [T, E] float32.
        topk: experts for each token.
        routed_scaling_factor: sum of a token's weights.
        bias: [E] float32, for the selection only; among equals the lower index wins.
        tid2eid: [vocab_size, topk]; with ``input_ids`` [T] it replaces the selection. Ids outside of it take its nearest row.

    Returns:
        ``topk_weights`` [T, topk] float32 and ``topk_ids`` [T, topk] int32.
    """
    wide = logits.double()
    scores = torch.where(wide > 20, wide, torch.log1p(torch.exp(wide.clamp(max=20)))).sqrt()
    if tid2eid is not None:
        if input_ids is None:
            raise ValueError("router: a table of experts by token id needs input_ids")
        topk_ids = tid2eid[input_ids.long().clamp(0, tid2eid.shape[0] - 1)].long()
    else:
        choice = scores if bias is None else scores + bias.double()
        topk_ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = scores.gather(1, topk_ids)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-20) * routed_scaling_factor).float(), topk_ids.int()
