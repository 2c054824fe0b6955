"""Moving tokens between data-parallel ranks whose experts are spread over all of them.

``dispatch`` gathers every rank's tokens, each rank computes its experts' share for all of them, and ``combine`` sums the
shares and keeps this rank's tokens. On GPUs vLLM's own collectives do both; its CPU communicator lacks the variants for
unequal sizes, so there the rows are padded to the largest rank's count.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from vllm_dsv4.compat import current_platform, get_dp_group, get_ep_group, num_tokens_across_dp


def dispatch(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of all ranks, in rank order; the arguments are this rank's [num_tokens, ...]."""
    if not current_platform.is_cpu():
        return get_ep_group().dispatch(x, topk_weights, topk_ids, False)
    sizes = num_tokens_across_dp()
    return _all_gather(x, sizes), _all_gather(topk_weights, sizes), _all_gather(topk_ids, sizes)


def combine(out: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum over ranks of ``out`` (all ranks' rows, in rank order)."""
    if not current_platform.is_cpu():
        return get_ep_group().combine(out, False)
    sizes = num_tokens_across_dp()
    rank = get_dp_group().rank_in_group
    start = sum(sizes[:rank])
    return get_dp_group().all_reduce(out)[start : start + sizes[rank]]


def _all_gather(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    largest = max(sizes)
    gathered = get_dp_group().all_gather(pad(x, (0, 0, 0, largest - x.shape[0])).contiguous(), dim=0)
    return torch.cat([gathered[rank * largest : rank * largest + size] for rank, size in enumerate(sizes)])
