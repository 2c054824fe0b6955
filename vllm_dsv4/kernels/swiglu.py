"""Triton kernel of ``swiglu``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._launch import launch

_BLOCK = 1024
"""Columns of one row that a program computes."""


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, out_dtype: torch.dtype, weights: torch.Tensor | None = None) -> torch.Tensor:
    """See ``reference/swiglu.py``. ``gate`` and ``up`` may be column slices of one tensor."""
    num_tokens, width = gate.shape
    gate, up = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (gate, up))
    out = torch.empty(num_tokens, width, dtype=out_dtype, device=gate.device)
    launch(
        _swiglu_kernel,
        (num_tokens, triton.cdiv(width, _BLOCK)),
        gate,
        up,
        weights,
        out,
        gate.stride(0),
        up.stride(0),
        WIDTH=width,
        LIMIT=float(limit),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


@triton.jit
def _swiglu_kernel(
    gate_ptr,
    up_ptr,
    weights_ptr,
    out_ptr,
    stride_gate,
    stride_up,
    WIDTH: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ``BLOCK`` columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + column, mask=mask, other=0.0).to(tl.float32)
    out = clamped_swiglu(gate, up, LIMIT)
    if weights_ptr is not None:
        out *= tl.load(weights_ptr + row).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def clamped_swiglu(gate, up, LIMIT: tl.constexpr):
    """float32 → float32; NaN stays NaN."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate / (1.0 + tl.exp(-gate)) * up
