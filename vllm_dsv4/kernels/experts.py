"""``experts`` on GPUs: the variant for many tokens, or for few."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_dsv4.kernels._experts_decode import experts_decode, takes_decode
from vllm_dsv4.kernels._experts_prefill import experts_prefill
from vllm_dsv4.reference.experts import experts_ref


def experts(
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
    """See ``reference/experts.py``; sums are float32."""
    if sum_slices is not None:  # the kernels round an expert's outputs at once; summing them unrounded is for the CPU
        return experts_ref(x, topk_weights, topk_ids, w13, w2, w13_sf, w2_sf, swiglu_limit, expert_map, sum_slices)
    if w13_sf is not None and w2_sf is not None and takes_decode(x, topk_ids, w13, w2):
        return experts_decode(x, topk_weights, topk_ids, w13, w2, w13_sf, w2_sf, swiglu_limit, expert_map)
    return experts_prefill(x, topk_weights, topk_ids, w13, w2, w13_sf, w2_sf, swiglu_limit, expert_map)
