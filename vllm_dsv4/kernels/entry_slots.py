"""Triton kernel of ``entry_slots``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._launch import launch

_COLUMNS = 512
"""Columns of one token that a program translates."""


def entry_slots(
    num_entries: torch.Tensor,
    token_to_req: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    topk_indices: torch.Tensor | None = None,
    width: int | None = None,
) -> torch.Tensor:
    """See ``reference/entry_slots.py``."""
    if topk_indices is not None:
        width = topk_indices.shape[1]
    if width is None:
        raise ValueError("width must be given when topk_indices is None")
    num_tokens = num_entries.shape[0]
    slots = torch.empty(num_tokens, width, dtype=torch.int32, device=num_entries.device)
    launch(
        _slots_kernel,
        (num_tokens, triton.cdiv(width, _COLUMNS)),
        num_entries,
        token_to_req,
        block_table,
        topk_indices,
        slots,
        block_table.stride(0),
        0 if topk_indices is None else topk_indices.stride(0),
        width,
        PAGE_SIZE=page_size,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return slots


@triton.jit(do_not_specialize=["stride_table", "stride_indices", "width"])
def _slots_kernel(
    num_entries_ptr,
    token_to_req_ptr,
    block_table_ptr,
    topk_indices_ptr,
    slots_ptr,
    stride_table,
    stride_indices,
    width,
    PAGE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: ``COLUMNS`` columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    entry = column
    if topk_indices_ptr is not None:
        entry = tl.load(topk_indices_ptr + token * stride_indices + column, mask=mask, other=-1)
    present = mask & (entry >= 0) & (entry < tl.load(num_entries_ptr + token))
    entry = tl.where(present, entry, 0)
    table = block_table_ptr + tl.load(token_to_req_ptr + token).to(tl.int64) * stride_table
    # Only what is present is read: the table may have no columns.
    page = tl.load(table + entry // PAGE_SIZE, mask=present, other=0)
    tl.store(slots_ptr + token * width + column, tl.where(present, page * PAGE_SIZE + entry % PAGE_SIZE, -1), mask=mask)
