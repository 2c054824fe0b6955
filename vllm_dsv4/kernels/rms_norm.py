"""Triton kernel of ``rms_norm``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._launch import launch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``reference/rms_norm.py``. ``x`` may be a column slice."""
    num_tokens, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    launch(
        _norm_kernel,
        (num_tokens,),
        x,
        weight,
        out,
        x.stride(0),
        WIDTH=width,
        EPS=eps,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )
    return out


@triton.jit
def _norm_kernel(x_ptr, weight_ptr, out_ptr, stride_x, WIDTH: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    x = tl.load(x_ptr + token * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x) / WIDTH + EPS)
    tl.store(out_ptr + token * WIDTH + column, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=mask)
