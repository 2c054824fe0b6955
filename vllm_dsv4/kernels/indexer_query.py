"""Triton kernel of ``indexer_query``.

Rotation and Hadamard transform are float64, so that the rounding to the model's dtype is that of the exact value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._entries import encode_e2m1, fp4_scale_exponent
from vllm_dsv4.kernels._fp8 import decode_e8m0, fp8_scale_exponent, largest_magnitude, pow2, quantize_e4m3
from vllm_dsv4.kernels._launch import has_fp8, launch
from vllm_dsv4.kernels._rope import load_cos_sin, rotate
from vllm_dsv4.reference.indexer_query import INDEXER_FORMATS, IndexerQuery

_BLOCK = tl.constexpr(32)
"""Columns of an MXFP4 block."""


def indexer_query(
    q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, format: str
) -> IndexerQuery:
    """See ``reference/indexer_query.py``; ``q`` and ``weights`` may be column slices."""
    if format not in INDEXER_FORMATS:
        raise ValueError(f"indexer_query: format must be one of {INDEXER_FORMATS}, got {format!r}")
    num_tokens, num_heads, head_dim = q.shape
    out, sf = _outputs(q, format)
    folded = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    heads = 2 if format == "mxfp4" else 8
    launch(
        _indexer_query_kernel,
        (num_tokens, triton.cdiv(num_heads, heads)),
        q,
        weights,
        positions,
        cos_sin_cache,
        out.view(torch.uint8) if format == "fp8" else out,
        sf,
        folded,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        FORMAT=format,
        NUM_HEADS=num_heads,
        DIM=head_dim,
        ROPE_DIM=cos_sin_cache.shape[1],
        HEADS=heads,
        BLOCK=triton.next_power_of_2(head_dim),
        HW_FP8=has_fp8(q.device),
        num_warps=4,
    )
    return IndexerQuery(out, sf, folded)


def _outputs(q: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Empty ``q`` and ``q_sf`` of the result."""
    if format == "rows":
        return torch.empty(q.shape, dtype=q.dtype, device=q.device), None
    num_tokens, num_heads, head_dim = q.shape
    if head_dim != 128:
        raise ValueError(f"indexer_query: format {format!r} needs heads of 128 columns, got {head_dim}")
    if format == "fp8":
        return torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device), None
    packed = torch.empty(num_tokens, num_heads, head_dim // 2, dtype=torch.uint8, device=q.device)
    return packed, torch.empty(num_tokens, num_heads, head_dim // 32, dtype=torch.uint8, device=q.device)


@triton.jit
def _indexer_query_kernel(
    q_ptr,
    weights_ptr,
    positions_ptr,
    cos_sin_ptr,
    out_ptr,
    sf_ptr,
    folded_ptr,
    stride_q_t,
    stride_q_h,
    stride_weights,
    FORMAT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HW_FP8: tl.constexpr,
):
    """One program: ``HEADS`` heads of one token."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_HEADS
    column = tl.arange(0, BLOCK)[None, :]
    mask = is_head[:, None] & (column < DIM)
    q = tl.load(q_ptr + token * stride_q_t + head[:, None] * stride_q_h + column, mask=mask, other=0.0).to(tl.float64)
    pair = tl.arange(0, BLOCK // 2)
    cos, sin = load_cos_sin(cos_sin_ptr, tl.load(positions_ptr + token), pair, (DIM - ROPE_DIM) // 2, ROPE_DIM // 2)
    even, odd = tl.split(q.reshape(HEADS, BLOCK // 2, 2))
    even, odd = rotate(even, odd, cos.to(tl.float64)[None, :], sin.to(tl.float64)[None, :])
    even, odd = _round(even, DTYPE), _round(odd, DTYPE)
    row = token * NUM_HEADS + head
    weight = tl.load(weights_ptr + token * stride_weights + head, mask=is_head, other=0.0).to(tl.float32)
    if FORMAT == "fp8":
        x = tl.interleave(even, odd)
        exponent = fp8_scale_exponent(largest_magnitude(x, 1))
        tl.store(out_ptr + row[:, None] * DIM + column, quantize_e4m3(x, exponent[:, None], HW_FP8), mask=mask)
        weight *= decode_e8m0(tl.minimum(exponent + 127, 255))
    elif FORMAT == "mxfp4":
        x = _round(_hadamard(tl.interleave(even, odd).to(tl.float64)), DTYPE)
        _store_mxfp4(out_ptr, sf_ptr, row, is_head, x)
    else:
        tl.store(out_ptr + row[:, None] * DIM + column, tl.interleave(even, odd).to(DTYPE), mask=mask)
    tl.store(folded_ptr + row, weight * DIM**-0.5 * NUM_HEADS**-0.5, mask=is_head)


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    """float64 → float32, rounded to DTYPE; to bfloat16 by integers, since Triton's interpreter would cut the bits off."""
    x = x.to(tl.float32)
    if tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _hadamard(x):
    """``x · H / sqrt(128)`` of float64 ``x`` [HEADS, 128], H in Sylvester order: products with H_16, then with H_8."""
    HEADS: tl.constexpr = x.shape[0]
    x = x.reshape(HEADS * 8, 16)
    x = tl.sum(x[:, :, None] * _sylvester(16)[None, :, :], axis=1)
    x = x.reshape(HEADS, 8, 16)
    x = tl.sum(x[:, :, None, :] * _sylvester(8)[None, :, :, None], axis=1)
    return x.reshape(HEADS, 128) * 128**-0.5


@triton.jit
def _sylvester(SIZE: tl.constexpr):
    """[SIZE, SIZE] of +1 and -1: minus where row and column have an odd number of common bits; SIZE <= 16."""
    index = tl.arange(0, SIZE)
    common = index[:, None] & index[None, :]
    common ^= common >> 2
    common ^= common >> 1
    return 1.0 - 2.0 * (common & 1).to(tl.float64)


@triton.jit
def _store_mxfp4(out_ptr, sf_ptr, row, is_row, x):
    """Quantise ``x`` [HEADS, 128] in blocks of 32 and store codes and scales at ``row`` [HEADS]."""
    HEADS: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = x.shape[1] // _BLOCK
    exponent = fp4_scale_exponent(largest_magnitude(x.reshape(HEADS * BLOCKS, _BLOCK), 1)).reshape(HEADS, BLOCKS)
    inverse = tl.where(exponent > 126, float("nan"), pow2(-exponent))
    code = encode_e2m1(x.reshape(HEADS, BLOCKS, _BLOCK) * inverse[:, :, None])
    low, high = tl.split(code.reshape(HEADS, BLOCKS * _BLOCK // 2, 2))
    byte = tl.arange(0, BLOCKS * _BLOCK // 2)[None, :]
    mask = is_row[:, None]
    tl.store(out_ptr + row[:, None] * (BLOCKS * _BLOCK // 2) + byte, (low | (high << 4)).to(tl.uint8), mask=mask)
    scale = tl.minimum(exponent + 127, 255).to(tl.uint8)
    tl.store(sf_ptr + row[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :], scale, mask=mask)
