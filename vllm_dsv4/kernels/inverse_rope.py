"""Triton kernel of ``inverse_rope``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._launch import launch
from vllm_dsv4.kernels._rope import load_cos_sin, rotate

_HEADS = 8
"""Heads of one token that a program rotates."""


def inverse_rope(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ``reference/inverse_rope.py``."""
    num_tokens, num_heads, head_dim = x.shape
    rope_dim = cos_sin_cache.shape[1]
    in_place = out is x
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(f"inverse_rope: x and out must be contiguous within a head, got strides {x.stride()} and {out.stride()}")
    # In place, the columns before the rotated ones are already what they should be.
    first_column = head_dim - rope_dim if in_place else 0
    heads = 32 if in_place else _HEADS
    launch(
        _inverse_rope_kernel,
        (num_tokens, triton.cdiv(num_heads, heads)),
        x,
        positions,
        cos_sin_cache,
        out,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        NUM_HEADS=num_heads,
        FIRST_COLUMN=first_column,
        HEAD_DIM=head_dim,
        ROPE_DIM=rope_dim,
        HEADS=heads,
        BLOCK=triton.next_power_of_2(head_dim - first_column),
        num_warps=4,
    )
    return out


@triton.jit
def _inverse_rope_kernel(
    x_ptr,
    positions_ptr,
    cos_sin_ptr,
    out_ptr,
    stride_x_t,
    stride_x_h,
    stride_out_t,
    stride_out_h,
    NUM_HEADS: tl.constexpr,
    FIRST_COLUMN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ``HEADS`` heads of one token, columns from ``FIRST_COLUMN`` on."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = FIRST_COLUMN + tl.arange(0, BLOCK)[None, :]
    mask = (head < NUM_HEADS) & (column < HEAD_DIM)
    x = tl.load(x_ptr + token * stride_x_t + head * stride_x_h + column, mask=mask, other=0.0).to(tl.float32)
    position = tl.load(positions_ptr + token)
    pair = FIRST_COLUMN // 2 + tl.arange(0, BLOCK // 2)[None, :]
    cos, sin = load_cos_sin(cos_sin_ptr, position, pair, (HEAD_DIM - ROPE_DIM) // 2, ROPE_DIM // 2)
    even, odd = tl.split(x.reshape(HEADS, BLOCK // 2, 2))
    even, odd = rotate(even, odd, cos, -sin)
    turned = tl.interleave(even, odd).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * stride_out_t + head * stride_out_h + column, turned, mask=mask)
