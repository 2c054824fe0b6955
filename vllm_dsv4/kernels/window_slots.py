"""Triton kernel of ``window_slots``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._launch import launch

_TOKENS = 4
"""Tokens of a program."""


def window_slots(
    positions: torch.Tensor, token_to_req: torch.Tensor, block_table: torch.Tensor, window: int, page_size: int
) -> torch.Tensor:
    """See ``reference/window_slots.py``."""
    num_tokens = positions.shape[0]
    slots = torch.empty(num_tokens, window, dtype=torch.int32, device=positions.device)
    launch(
        _window_slots_kernel,
        (triton.cdiv(num_tokens, _TOKENS),),
        positions,
        token_to_req,
        block_table,
        slots,
        block_table.stride(0),
        num_tokens,
        WINDOW=window,
        PAGE_SIZE=page_size,
        TOKENS=_TOKENS,
        BLOCK=triton.next_power_of_2(window),
        num_warps=4,
    )
    return slots


@triton.jit(do_not_specialize=["stride_table", "num_tokens"])
def _window_slots_kernel(
    positions_ptr,
    token_to_req_ptr,
    block_table_ptr,
    slots_ptr,
    stride_table,
    num_tokens,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ``TOKENS`` tokens, their newest slots first."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    last = tl.load(positions_ptr + token, mask=is_token, other=-1).to(tl.int32)
    table = block_table_ptr + tl.load(token_to_req_ptr + token, mask=is_token, other=0).to(tl.int64) * stride_table
    column = tl.arange(0, BLOCK)[None, :]
    position = last[:, None] - column
    present = (position >= 0) & (column < WINDOW)
    position = tl.where(present, position, 0)
    page = tl.load(table[:, None] + position // PAGE_SIZE, mask=present, other=0)
    slot = tl.where(present, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(slots_ptr + token.to(tl.int64)[:, None] * WINDOW + column, slot, mask=is_token[:, None] & (column < WINDOW))
