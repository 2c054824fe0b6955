"""The routed experts: MXFP4, block FP8 or plain weights (model.md 4, 5.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_dsv4.reference.numerics import dequantize_block_fp8, dequantize_mxfp4, fp8_round_trip
from vllm_dsv4.reference.swiglu import swiglu_ref


def experts_ref(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_sf: torch.Tensor | None = None,
    w2_sf: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
    expert_map: torch.Tensor | None = None,
    sum_slices: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """``Σ_e w2_e · (weight_e · swiglu(w1_e · x, w3_e · x))`` over the experts chosen for each token.

    With quantised weights the activations are quantised before either product, in groups of 128. What w1, w3 and w2 give, and
    the weighted activation, are rounded to x's dtype; the sum over experts is not.

    Args:
        x: [T, D].
        topk_weights: [T, topk] float32.
        topk_ids: [T, topk] int32, global expert ids, -1 = none; an id may repeat.
        w13: [E, 2I, D], rows of w1 (gate), then of w3 (up): uint8 [E, 2I, D/2] MXFP4, float8_e4m3fn block FP8, or plain.
        w2: [E, D, I], likewise.
        w13_sf: uint8 E8M0 [E, 2I, D/32], or float32 [E, ceil(2I/128), ceil(D/128)].
        w2_sf: likewise.
        swiglu_limit: 0 = no clamp.
        expert_map: [num_experts] global id to index into the weights, -1 = not on this rank. None: all are, in order.
        sum_slices: if other ranks hold the other slices of the same experts' I: sums one expert's unrounded float64 outputs
            over those ranks.

    Returns:
        [T, D] float64: this rank's experts' share.
    """
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    local_ids = topk_ids.long()
    if expert_map is not None:
        local_ids = torch.where(local_ids < 0, -1, expert_map[local_ids.clamp(min=0)].long())
    order = local_ids.flatten().argsort(stable=True)
    hit, counts = local_ids.flatten()[order].unique_consecutive(return_counts=True)
    for expert, pairs in zip(hit.tolist(), order.split(counts.tolist()), strict=True):
        if expert < 0:
            continue
        token, choice = pairs // topk_ids.shape[1], pairs % topk_ids.shape[1]
        gate, up = (_widen(x[token], w13_sf) @ _dequantize(w13, w13_sf, expert).T).to(x.dtype).chunk(2, -1)
        hidden = swiglu_ref(gate, up, swiglu_limit, x.dtype, topk_weights[token, choice])
        y = _widen(hidden, w2_sf) @ _dequantize(w2, w2_sf, expert).T
        if sum_slices is not None:
            y = sum_slices(y)
        out.index_add_(0, token, y.to(x.dtype).double())
    return out


def _widen(x: torch.Tensor, weight_sf: torch.Tensor | None) -> torch.Tensor:
    """An activation in float64, after quantisation where the weights are quantised."""
    return x.double() if weight_sf is None else fp8_round_trip(x)


def _dequantize(weight: torch.Tensor, weight_sf: torch.Tensor | None, expert: int) -> torch.Tensor:
    """One expert's weight [out, in] in float64."""
    if weight_sf is None:
        return weight[expert].double()
    dequantize = dequantize_mxfp4 if weight.dtype == torch.uint8 else dequantize_block_fp8
    return dequantize(weight[expert], weight_sf[expert], torch.float64)
