"""Triton kernel of ``hc_post``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._hyper_connections import load_streams, merge
from vllm_dsv4.kernels._launch import launch

_BLOCK_D = 1024
"""Columns of every stream of one token that a program merges."""


def hc_post(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """See ``reference/hc_post.py``."""
    num_tokens, m, width = streams.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    streams = streams if streams.stride(2) == 1 else streams.contiguous()
    out = torch.empty(num_tokens, m, width, dtype=streams.dtype, device=streams.device)
    block = min(_BLOCK_D, triton.next_power_of_2(width))
    launch(
        _merge_kernel,
        (num_tokens, triton.cdiv(width, block)),
        x,
        streams,
        post.contiguous(),
        comb.contiguous(),
        out,
        x.stride(0),
        streams.stride(0),
        streams.stride(1),
        M=m,
        D=width,
        BLOCK_D=block,
        num_warps=4,
    )
    return out


@triton.jit
def _merge_kernel(
    x_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    stride_x,
    stride_token,
    stride_stream,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: ``BLOCK_D`` columns of every stream of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = column < D
    streams = load_streams(streams_ptr + token * stride_token + column, stride_stream, mask, M)
    x = tl.load(x_ptr + token * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    merged = merge(x, streams, post_ptr + token * M, comb_ptr + token * (M * M), out_ptr.dtype.element_ty, M)
    for j in tl.static_range(M):
        tl.store(out_ptr + (token * M + j) * D + column, merged[j], mask=mask)
