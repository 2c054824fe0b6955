"""Sums over tensor-parallel ranks."""

from __future__ import annotations

import torch

from vllm_dsv4.compat import (
    current_platform,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)

PARTIAL_SUM_DTYPE = torch.float64 if current_platform.is_cpu() else torch.float32
"""What a rank's share of a sum is kept in until it is reduced and rounded once."""


def sum_over_ranks(partial: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's ``partial`` [num_tokens, size], on every rank, in its dtype.

    The reference ops give float64 partial sums. Those are gathered and added in rank order, so that on the CPU a sharded
    model rounds as an unsharded one does (up to float64's own rounding); vLLM's all-reduce has no float64.
    """
    world_size = get_tensor_model_parallel_world_size()
    if world_size == 1:
        return partial
    if partial.dtype != torch.float64:
        return tensor_model_parallel_all_reduce(partial)
    # As pairs of float32, which the collective only moves.
    gathered = tensor_model_parallel_all_gather(partial.contiguous().view(torch.float32), dim=0)
    return gathered.view(torch.float64).view(world_size, *partial.shape).sum(0)
