"""Triton kernel of ``activation_quantize``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._fp8 import decode_e8m0, fp8_scale_exponent, largest_magnitude, quantize_e4m3
from vllm_dsv4.kernels._launch import has_fp8, launch

_GROUPS = 8
"""Groups of one token that a program quantises."""


def activation_quantize(x: torch.Tensor, group_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``reference/activation_quantize.py``."""
    num_tokens, width = x.shape
    if width % group_size:
        raise ValueError(f"activation_quantize: group_size must divide the {width} columns of x, got {group_size}")
    num_groups = width // group_size
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    sf = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x.device)
    grid = (num_tokens, triton.cdiv(num_groups, _GROUPS))
    launch(
        _quantize_kernel,
        grid,
        x,
        q.view(torch.uint8),
        sf,
        x.stride(0),
        NUM_GROUPS=num_groups,
        GROUP_SIZE=group_size,
        GROUPS=_GROUPS,
        HW_FP8=has_fp8(x.device),
        num_warps=4,
    )
    return q, sf


@triton.jit
def _quantize_kernel(
    x_ptr,
    q_ptr,
    sf_ptr,
    stride_x,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    HW_FP8: tl.constexpr,
):
    """One program: ``GROUPS`` groups of one token."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    mask = (groups < NUM_GROUPS)[:, None]
    x = tl.load(x_ptr + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    exponent = fp8_scale_exponent(largest_magnitude(x, 1))
    q = quantize_e4m3(x, exponent[:, None], HW_FP8)
    tl.store(q_ptr + token * NUM_GROUPS * GROUP_SIZE + columns, q, mask=mask)
    sf = decode_e8m0(tl.minimum(exponent + 127, 255))
    tl.store(sf_ptr + token * NUM_GROUPS + groups, sf, mask=groups < NUM_GROUPS)
