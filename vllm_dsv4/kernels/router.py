"""Triton kernel of ``router``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._launch import launch


def router(
    logits: torch.Tensor,
    topk: int,
    routed_scaling_factor: float,
    bias: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``reference/router.py``; scores are float32."""
    if tid2eid is not None and input_ids is None:
        raise ValueError("router: a table of experts by token id needs input_ids")
    num_tokens, num_experts = logits.shape
    topk_weights = torch.empty(num_tokens, topk, dtype=torch.float32, device=logits.device)
    topk_ids = torch.empty(num_tokens, topk, dtype=torch.int32, device=logits.device)
    launch(
        _router_kernel,
        (num_tokens,),
        logits,
        bias,
        tid2eid,
        input_ids,
        topk_weights,
        topk_ids,
        logits.stride(0),
        0 if tid2eid is None else tid2eid.shape[0],
        NUM_EXPERTS=num_experts,
        TOPK=topk,
        SCALE=float(routed_scaling_factor),
        num_warps=1,
    )
    return topk_weights, topk_ids


@triton.jit(do_not_specialize=["vocab_size"])
def _router_kernel(
    logits_ptr,
    bias_ptr,
    tid2eid_ptr,
    input_ids_ptr,
    topk_weights_ptr,
    topk_ids_ptr,
    stride_logits,
    vocab_size,
    NUM_EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """One program, one warp: one token."""
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * stride_logits
    choice = tl.arange(0, triton.next_power_of_2(TOPK))
    mask = choice < TOPK
    if tid2eid_ptr is not None:
        row = tl.load(input_ids_ptr + token).to(tl.int64)
        row = tl.minimum(tl.maximum(row, 0), vocab_size - 1)
        ids = tl.load(tid2eid_ptr + row * TOPK + choice, mask=mask, other=0).to(tl.int32)
    else:
        ids = _select(logits_ptr, bias_ptr, choice, NUM_EXPERTS, TOPK)
    scores = tl.where(mask, _score(tl.load(logits_ptr + ids)), 0.0)
    tl.store(topk_weights_ptr + token * TOPK + choice, scores / (tl.sum(scores) + 1e-20) * SCALE, mask=mask)
    tl.store(topk_ids_ptr + token * TOPK + choice, ids, mask=mask)


@triton.jit
def _score(logit):
    """sqrt(softplus(logit))."""
    e = tl.exp(tl.minimum(logit, 20.0))
    # log(1 + e) that does not lose a small e: the quotient undoes the rounding of 1 + e.
    total = 1.0 + e
    log1p = tl.where(total == 1.0, e, tl.log(total) * (e / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.sqrt(tl.where(logit > 20.0, logit, log1p))


@triton.jit
def _select(logits_ptr, bias_ptr, choice, NUM_EXPERTS: tl.constexpr, TOPK: tl.constexpr):
    """Ids of the TOPK largest biased scores, in falling order, at ``choice`` 0, 1, ...; among equals the lower id first."""
    WIDTH: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    expert = tl.arange(0, WIDTH)
    value = _score(tl.load(logits_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0))
    if bias_ptr is not None:
        value += tl.load(bias_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0)
    # Integers that are ordered as the pairs (value, -id); NaN is above infinity, as torch sorts it.
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    key = (ordered.to(tl.int64) << 32) | (WIDTH - 1 - expert)
    lowest: tl.constexpr = -(2**63)
    key = tl.where(expert < NUM_EXPERTS, key, lowest)
    ids = tl.zeros_like(choice)
    for place in tl.static_range(TOPK):
        best = tl.max(key)
        ids = tl.where(choice == place, WIDTH - 1 - (best & 0xFFFFFFFF).to(tl.int32), ids)
        key = tl.where(key == best, lowest, key)
    return ids
