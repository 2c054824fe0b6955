"""Products of activations with weights [N, K] that share their kernels: ``fp8_linear``, ``grouped_linear``, ``linear``.

Three kernels, by the number of tokens. One token: a program sums whole rows of the weight on the ordinary cores, so that all
of them can read at once. Few tokens, and weights whose scales are arbitrary: tiles on tensor cores, in which FP8 codes are
multiplied as they are, exact in float16, and every 128 columns' sum is scaled. Tiles are transposed (a weight's rows are the
matrix instruction's rows): it takes its left operand from registers, and that is where weights are decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._fp8 import decode_e4m3, encode_e4m3, fp8_scale_exponent, largest_magnitude, pow2
from vllm_dsv4.kernels._launch import has_fp8, launch, num_sms

GROUP = 128
"""Columns of an activation's scale; rows and columns of a weight's scale."""

_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Tile:
    """A program's share: tokens, rows of the weight, columns in a step of the sum."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def one_token(x: torch.Tensor, weight: torch.Tensor, weight_sf: torch.Tensor | None, out: torch.Tensor, quantize: bool) -> None:
    """``out[0, g] = x[0, g] · weight[g]ᵀ``: x [1, G, K], weight [G, N, K], weight_sf [G, ceil(N/128), ceil(K/128)], out [1, G, N].

    ``quantize``: x is rounded to FP8 in groups of 128 (model.md 5.1).
    """
    num_groups, size_n, size_k = weight.shape
    block_n, block_k = _row_block(weight, num_sms(x.device))
    launch(
        _row_kernel,
        (triton.cdiv(size_n, block_n), num_groups),
        x,
        x.stride(1),
        _bytes(weight),
        weight_sf,
        out,
        N=size_n,
        K=size_k,
        QUANTIZE=quantize,
        HW_FP8=has_fp8(x.device),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
    )


def _row_block(weight: torch.Tensor, num_programs: int) -> tuple[int, int]:
    """Rows and columns of a step: about 32 KiB of weights, so that a step has enough reads in flight; four programs an SM."""
    num_groups, size_n, size_k = weight.shape
    block_n = 16
    while block_n > 4 and num_groups * size_n < 4 * num_programs * block_n:
        block_n //= 2
    block_k = triton.next_power_of_2(max(size_k, GROUP))
    return block_n, min(block_k, max(GROUP, 32768 // (block_n * weight.element_size())))


@triton.jit
def _row_kernel(
    x_ptr,
    stride_x_g,
    w_ptr,
    w_sf_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    QUANTIZE: tl.constexpr,
    HW_FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: ``BLOCK_N`` outputs of one group, which share their scales since 128 is a multiple of it."""
    group = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(0) * BLOCK_N
    row = tl.arange(0, BLOCK_N)
    row_mask = first_row + row < N
    w_ptr += (group * N + first_row) * K
    if w_sf_ptr is not None:
        w_sf_ptr += (group * ((N + 127) // 128) + first_row // 128) * ((K + 127) // 128)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        # Before anything that waits for x.
        w = tl.load(w_ptr + row[:, None] * K + column[None, :], mask=row_mask[:, None] & (column < K)[None, :], other=0)
        x = tl.load(x_ptr + group * stride_x_g + column, mask=column < K, other=0.0).to(tl.float32)
        if w_sf_ptr is not None:
            x = tl.reshape(x, (BLOCK_K // 128, 128))
            block = start // 128 + tl.arange(0, BLOCK_K // 128)
            scale = tl.load(w_sf_ptr + block, mask=block < (K + 127) // 128, other=0.0)
            if QUANTIZE:
                code, exponent = _quantize(x, HW_FP8)
                x = code.to(tl.float32)
                scale *= pow2(exponent)
            x = tl.reshape(x * scale[:, None], (BLOCK_K,))
        if w_sf_ptr is not None:
            w = decode_e4m3(w, HW_FP8)
        total += tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    tl.store(out_ptr + group * N + first_row + row, total.to(out_ptr.dtype.element_ty), mask=row_mask)


@triton.jit
def _quantize(x, HW_FP8: tl.constexpr):
    """float32 [M, 128] → e4m3 values in float16, and the exponents of the rows' scales, at most 127."""
    exponent = fp8_scale_exponent(largest_magnitude(x, 1))
    inverse = tl.where(exponent > 126, float("nan"), pow2(-exponent))
    code = decode_e4m3(encode_e4m3(x * inverse[:, None], HW_FP8), HW_FP8)
    return code, tl.minimum(exponent, 127)


def quantize(x: torch.Tensor, fold: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] → ``(q [T, K rounded up to 128], sf [T, ceil(K/128)] float32)``, the values that ``activation_quantize`` gives.

    ``fold``: q is bfloat16 and includes the scale, exactly; otherwise float16, which holds every e4m3 value.
    """
    num_tokens, size_k = x.shape
    num_blocks = triton.cdiv(size_k, GROUP)
    q = torch.empty(num_tokens, num_blocks * GROUP, dtype=torch.bfloat16 if fold else torch.float16, device=x.device)
    sf = torch.empty(num_tokens, num_blocks, dtype=torch.float32, device=x.device)
    blocks = 8
    launch(
        _quantize_kernel,
        (num_tokens, triton.cdiv(num_blocks, blocks)),
        x,
        q,
        sf,
        x.stride(0),
        K=size_k,
        FOLD=fold,
        HW_FP8=has_fp8(x.device),
        BLOCKS=blocks,
        num_warps=4,
    )
    return q, sf


@triton.jit
def _quantize_kernel(x_ptr, q_ptr, sf_ptr, stride_x, K: tl.constexpr, FOLD: tl.constexpr, HW_FP8: tl.constexpr, BLOCKS: tl.constexpr):
    """One program: ``BLOCKS`` groups of 128 columns of one token."""
    NUM_BLOCKS: tl.constexpr = (K + 127) // 128
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + token * stride_x + column, mask=column < K, other=0.0).to(tl.float32)
    q, exponent = _quantize(x, HW_FP8)
    scale = pow2(exponent)
    if FOLD:
        q = q.to(tl.float32) * scale[:, None]
    mask = block < NUM_BLOCKS
    tl.store(q_ptr + token * NUM_BLOCKS * 128 + column, q.to(q_ptr.dtype.element_ty), mask=mask[:, None])
    tl.store(sf_ptr + token * NUM_BLOCKS + block, scale, mask=mask)


def tiled(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    weight: torch.Tensor,
    weight_sf: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    quantize: bool = False,
) -> None:
    """``out[:, g] = x[:, g] · weight[g]ᵀ``: x [T, G, K], weight [G, N, K], weight_sf [G, ceil(N/128), ceil(K/128)], out [T, G, N].

    ``x_sf`` [T, ceil(K/128)]: scales of x, which then has 16-bit e4m3 values and one group. ``quantize``: every program rounds x
    to FP8 itself.
    """
    num_tokens = x.shape[0]
    num_groups, size_n, size_k = weight.shape
    is_code = quantize or x_sf is not None
    dtype = torch.float32 if x.device.type == "cpu" else torch.float16 if is_code else x.dtype
    launch(
        _tile_kernel,
        (triton.cdiv(num_tokens, tile.block_m) * triton.cdiv(size_n, tile.block_n), num_groups),
        x,
        x.stride(0),
        x.stride(1),
        x_sf,
        _bytes(weight),
        weight_sf,
        out,
        num_tokens,
        N=size_n,
        K=size_k,
        G=num_groups,
        QUANTIZE=quantize,
        DTYPE=_DTYPES[dtype],
        HW_FP8=has_fp8(x.device),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_kernel(
    x_ptr,
    stride_x_t,
    stride_x_g,
    x_sf_ptr,
    w_ptr,
    w_sf_ptr,
    out_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: ``BLOCK_M`` tokens times ``BLOCK_N`` rows of one group's weight. BLOCK_N and BLOCK_K divide 128."""
    K_BLOCKS: tl.constexpr = (K + 127) // 128
    group = tl.program_id(1).to(tl.int64)
    tile_m, tile_n = _tile(tl.program_id(0), num_tokens, N, BLOCK_M, BLOCK_N)
    first_token, first_row = (tile_m * BLOCK_M).to(tl.int64), (tile_n * BLOCK_N).to(tl.int64)
    token, row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    token_mask, row_mask = token < num_tokens - first_token, row < N - first_row
    x_ptr += group * stride_x_g + first_token * stride_x_t
    w_ptr += (group * N + first_row) * K
    x_offset = token[:, None] * stride_x_t + column[None, :]
    w_offset = row[:, None] * K + column[None, :]
    if x_sf_ptr is not None:
        x_sf_ptr += first_token * K_BLOCKS
    if w_sf_ptr is not None:
        w_sf_ptr += (group * ((N + 127) // 128) + first_row // 128) * K_BLOCKS
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            w_mask, x_mask = row_mask[:, None], token_mask[:, None]
        else:
            w_mask, x_mask = row_mask[:, None] & (start + column < K)[None, :], token_mask[:, None] & (start + column < K)[None, :]
        w = tl.load(w_ptr + start + w_offset, mask=w_mask, other=0)
        x = tl.load(x_ptr + start + x_offset, mask=x_mask, other=0.0)
        if w_sf_ptr is None:
            acc = tl.dot(w.to(DTYPE), tl.trans(x.to(DTYPE)), acc, input_precision="ieee")
        else:
            scale = tl.load(w_sf_ptr + start // 128)
            if QUANTIZE:
                x, exponent = _quantize(x.to(tl.float32), HW_FP8)
                scale = (scale * pow2(exponent))[None, :]
            elif x_sf_ptr is not None:
                scale = (scale * tl.load(x_sf_ptr + token * K_BLOCKS + start // 128, mask=token_mask, other=0.0))[None, :]
            w = decode_e4m3(w, HW_FP8)
            acc += tl.dot(w.to(DTYPE), tl.trans(x.to(DTYPE)), input_precision="ieee") * scale
    out_ptrs = out_ptr + (first_token * G + group) * N + first_row + token[:, None] * (G * N) + row[None, :]
    tl.store(out_ptrs, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=token_mask[:, None] & row_mask[None, :])


@triton.jit
def _tile(index, num_tokens, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tile ``index`` → its row and column among the tiles, in stripes of 8 tiles of tokens, so that neighbours share operands."""
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    stripe = index // (8 * tiles_n)
    height = tl.minimum(tiles_m - stripe * 8, 8)
    within = index % (8 * tiles_n)
    return stripe * 8 + within % height, within // height


def dequantize(weight: torch.Tensor, weight_sf: torch.Tensor) -> torch.Tensor:
    """weight [G, N, K], weight_sf [G, ceil(N/128), ceil(K/128)] → bfloat16 [G, N, K]: exact where scales are powers of two."""
    num_groups, size_n, size_k = weight.shape
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    launch(
        _dequantize_kernel,
        (triton.cdiv(size_k, GROUP), triton.cdiv(size_n, 32), num_groups),
        _bytes(weight),
        weight_sf,
        out,
        N=size_n,
        K=size_k,
        HW_FP8=has_fp8(weight.device),
        num_warps=4,
    )
    return out


@triton.jit
def _dequantize_kernel(w_ptr, sf_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr, HW_FP8: tl.constexpr):
    """One program: 32 rows by 128 columns, of one scale."""
    group = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * 32 + tl.arange(0, 32)
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    sf = tl.load(sf_ptr + (group * ((N + 127) // 128) + tl.program_id(1) // 4) * ((K + 127) // 128) + tl.program_id(0))
    mask = (row < N)[:, None] & (column < K)[None, :]
    offset = (group * N + row[:, None]) * K + column[None, :]
    w = decode_e4m3(tl.load(w_ptr + offset, mask=mask, other=0), HW_FP8).to(tl.float32)
    tl.store(out_ptr + offset, (w * sf).to(tl.bfloat16), mask=mask)


def _bytes(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.uint8) if weight.dtype == torch.float8_e4m3fn else weight
