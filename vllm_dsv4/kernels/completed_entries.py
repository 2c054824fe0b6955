"""Triton kernel of ``completed_entries``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._launch import launch

_TOKENS = 128


def completed_entries(
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    token_to_req: torch.Tensor,
    block_table: torch.Tensor,
    compress_ratio: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``reference/completed_entries.py``."""
    num_tokens = positions.shape[0]
    num_entries = torch.empty(num_tokens, dtype=torch.int32, device=positions.device)
    entry_slots = torch.empty(num_tokens, dtype=torch.int64, device=positions.device)
    launch(
        _entries_kernel,
        (triton.cdiv(num_tokens, _TOKENS),),
        positions,
        slot_mapping,
        token_to_req,
        block_table,
        num_entries,
        entry_slots,
        block_table.stride(0),
        num_tokens,
        RATIO=compress_ratio,
        PAGE_SIZE=page_size,
        TOKENS=_TOKENS,
        num_warps=4,
    )
    return num_entries, entry_slots


@triton.jit(do_not_specialize=["stride_table", "num_tokens"])
def _entries_kernel(
    positions_ptr,
    slot_mapping_ptr,
    token_to_req_ptr,
    block_table_ptr,
    num_entries_ptr,
    entry_slots_ptr,
    stride_table,
    num_tokens,
    RATIO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program: ``TOKENS`` tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = token < num_tokens
    position = tl.load(positions_ptr + token, mask=mask, other=0)
    is_padding = tl.load(slot_mapping_ptr + token, mask=mask, other=-1) < 0
    tl.store(num_entries_ptr + token, tl.where(is_padding, 0, (position + 1) // RATIO).to(tl.int32), mask=mask)
    completes = ((position + 1) % RATIO == 0) & ~is_padding
    entry = position // RATIO
    request = tl.load(token_to_req_ptr + token, mask=mask, other=0).to(tl.int64)
    page = tl.load(block_table_ptr + request * stride_table + entry // PAGE_SIZE, mask=completes, other=0).to(tl.int64)
    tl.store(entry_slots_ptr + token, tl.where(completes, page * PAGE_SIZE + entry % PAGE_SIZE, -1), mask=mask)
