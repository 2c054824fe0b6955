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

from vllm_dsv4.kernels._fp8 import decode_e4m3, fp8_scale_exponent, largest_magnitude, pow2, quantize_e4m3
from vllm_dsv4.kernels._launch import capability, has_fp8, launch, num_sms

GROUP = 128
"""Columns of an activation's scale; rows and columns of a weight's scale."""


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
    # Codes that are decoded by arithmetic need registers.
    step_bytes = 32768 if has_fp8(x.device) or weight.dtype != torch.float8_e4m3fn else 16384
    block_n, block_k = _row_block(weight, num_sms(x.device), step_bytes)
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


def _row_block(weight: torch.Tensor, num_programs: int, step_bytes: int) -> tuple[int, int]:
    """Rows and columns of a step: many bytes of weights, so that it has enough reads in flight; four programs an SM."""
    num_groups, size_n, size_k = weight.shape
    block_n = 16
    while block_n > 4 and num_groups * size_n < 4 * num_programs * block_n:
        block_n //= 2
    block_k = triton.next_power_of_2(max(size_k, GROUP))
    return block_n, min(block_k, max(GROUP, step_bytes // (block_n * weight.element_size())))


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
        if QUANTIZE:
            block = start // 128 + tl.arange(0, BLOCK_K // 128)
            scale = tl.load(w_sf_ptr + block, mask=block < (K + 127) // 128, other=0.0)
            x = tl.reshape(x, (BLOCK_K // 128, 128))
            exponent = fp8_scale_exponent(largest_magnitude(x, 1))
            x = decode_e4m3(quantize_e4m3(x, exponent[:, None], HW_FP8), HW_FP8).to(tl.float32)
            x = tl.reshape(x * (scale * pow2(tl.minimum(exponent, 127)))[:, None], (BLOCK_K,))
            w = decode_e4m3(w, HW_FP8)
        elif w_sf_ptr is not None:
            scale = tl.load(w_sf_ptr + column // 128, mask=column < K, other=0.0)
            w = (decode_e4m3(w, HW_FP8).to(tl.float32) * scale[None, :]).to(x_ptr.dtype.element_ty)
        total += tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    tl.store(out_ptr + group * N + first_row + row, total.to(out_ptr.dtype.element_ty), mask=row_mask)


def codes_dtype(device: torch.device) -> torch.dtype:
    """What quantised activations are kept in: their e4m3 codes for tensor cores that take those, else float16, exactly."""
    return torch.uint8 if has_fp8(device) else torch.float16


def quantize(x: torch.Tensor, dtype: torch.dtype, num_counters: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x [T, K] → ``(q [T, K rounded up to 128], sf [T, ceil(K/128)] float32, counters)``, the values that ``activation_quantize`` gives.

    ``dtype``: see ``codes_dtype``. ``counters`` are zeros for ``tiled``: here they cost no launch.
    """
    num_tokens, size_k = x.shape
    num_blocks = triton.cdiv(size_k, GROUP)
    q = torch.empty(num_tokens, num_blocks * GROUP, dtype=dtype, device=x.device)
    sf = torch.empty(num_tokens, num_blocks, dtype=torch.float32, device=x.device)
    counters = torch.empty(num_counters, dtype=torch.int32, device=x.device) if num_counters else None
    blocks = 8
    launch(
        _quantize_kernel,
        (num_tokens, triton.cdiv(num_blocks, blocks)),
        x,
        q,
        sf,
        counters,
        x.stride(0),
        num_counters,
        K=size_k,
        HW_FP8=has_fp8(x.device),
        OVERLAPS=_overlaps(x.device),
        BLOCKS=blocks,
        num_warps=4,
    )
    return q, sf, counters


@triton.jit(do_not_specialize=["num_counters"])
def _quantize_kernel(
    x_ptr,
    q_ptr,
    sf_ptr,
    counters_ptr,
    stride_x,
    num_counters,
    K: tl.constexpr,
    HW_FP8: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program: ``BLOCKS`` groups of 128 columns of one token."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    NUM_BLOCKS: tl.constexpr = (K + 127) // 128
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + token * stride_x + column, mask=column < K, other=0.0).to(tl.float32)
    exponent = fp8_scale_exponent(largest_magnitude(x, 1))
    code = quantize_e4m3(x, exponent[:, None], HW_FP8)
    if q_ptr.dtype.element_ty != tl.uint8:
        code = decode_e4m3(code, HW_FP8)
    mask = block < NUM_BLOCKS
    tl.store(q_ptr + token * NUM_BLOCKS * 128 + column, code, mask=mask[:, None])
    tl.store(sf_ptr + token * NUM_BLOCKS + block, pow2(tl.minimum(exponent, 127)), mask=mask)
    if counters_ptr is not None:
        is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        for start in range(0, tl.where(is_first, num_counters, 0), 128):
            index = start + tl.arange(0, 128)
            tl.store(counters_ptr + index, tl.zeros((128,), tl.int32), mask=index < num_counters)


def num_tiles(num_tokens: int, size_n: int, tile: Tile) -> int:
    return triton.cdiv(num_tokens, tile.block_m) * triton.cdiv(size_n, tile.block_n)


def tiled(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    weight: torch.Tensor,
    weight_sf: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    splits: int = 1,
    counters: torch.Tensor | None = None,
) -> None:
    """``out[:, g] = x[:, g] · weight[g]ᵀ``: x [T, G, K], weight [G, N, K], weight_sf [G, ceil(N/128), ceil(K/128)], out [T, G, N].

    ``x_sf`` [T, ceil(K/128)]: scales of x, which then has e4m3 values (see ``quantize``) and one group; without it, FP8 weights
    are widened to x's dtype. ``splits``: programs that share the columns of a tile; the last to end adds their sums in a fixed
    order, for which there must be a zeroed counter a tile.
    """
    num_tokens = x.shape[0]
    num_groups, size_n, size_k = weight.shape
    overlaps = x_sf is not None and _overlaps(x.device)  # with ``quantize``
    partial = torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device) if splits > 1 else None
    launch(
        _tile_kernel,
        (num_tiles(num_tokens, size_n, tile), num_groups * splits),
        x,
        x.stride(0),
        x.stride(1),
        x_sf,
        _bytes(weight),
        weight_sf,
        out,
        partial,
        counters,
        num_tokens,
        N=size_n,
        K=size_k,
        G=num_groups,
        SPLITS=splits,
        DTYPE=_dot_dtype(x),
        HW_FP8=has_fp8(x.device),
        OVERLAPS=overlaps,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **({"launch_pdl": True} if overlaps else {}),
    )


def _overlaps(device: torch.device) -> bool:
    """Whether a kernel may start before the one it depends on has ended."""
    return capability(device) >= (9, 0)


def _dot_dtype(x: torch.Tensor) -> tl.dtype:
    """The type that a tile's operands are multiplied in."""
    if x.device.type == "cpu":  # the interpreter's bfloat16 products are wrong
        return tl.float32
    return {torch.uint8: tl.float8e4nv, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[x.dtype]


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_kernel(
    x_ptr,
    stride_x_t,
    stride_x_g,
    x_sf_ptr,
    w_ptr,
    w_sf_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: ``BLOCK_M`` tokens times ``BLOCK_N`` rows of one group's weight, over one part of the columns. BLOCK_N and
    BLOCK_K divide 128."""
    K_BLOCKS: tl.constexpr = (K + 127) // 128
    SPLIT_K: tl.constexpr = (K_BLOCKS + SPLITS - 1) // SPLITS * 128
    group, split = (tl.program_id(1) // SPLITS).to(tl.int64), tl.program_id(1) % SPLITS
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
    TRANSPOSED: tl.constexpr = BLOCK_M < 64 or (w_sf_ptr is not None and x_sf_ptr is None)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if TRANSPOSED else (BLOCK_M, BLOCK_N), tl.float32)
    first = split * SPLIT_K
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    for start in range(first, tl.minimum(first + SPLIT_K, K), BLOCK_K):
        if K % BLOCK_K == 0:
            x_mask = token_mask[:, None]
            w = (
                tl.load(w_ptr + start + w_offset)
                if N % BLOCK_N == 0
                else tl.load(w_ptr + start + w_offset, mask=row_mask[:, None], other=0)
            )
        else:
            in_row = (start + column < K)[None, :]
            x_mask = token_mask[:, None] & in_row
            w = tl.load(w_ptr + start + w_offset, mask=row_mask[:, None] & in_row, other=0)
        x = tl.load(x_ptr + start + x_offset, mask=x_mask, other=0)
        if w_sf_ptr is None:
            acc = _dot(x.to(DTYPE), w.to(DTYPE), acc, TRANSPOSED)
        else:
            scale = tl.load(w_sf_ptr + start // 128)
            if x_sf_ptr is None:
                w = (decode_e4m3(w, HW_FP8).to(tl.float32) * scale).to(x_ptr.dtype.element_ty)
                acc = _dot(x.to(DTYPE), w.to(DTYPE), acc, TRANSPOSED)
            else:
                x_scale = tl.load(x_sf_ptr + token * K_BLOCKS + start // 128, mask=token_mask, other=0.0) * scale
                product = _dot(_values(x, DTYPE, HW_FP8), _values(w, DTYPE, HW_FP8), None, TRANSPOSED)
                acc += product * (x_scale[None, :] if TRANSPOSED else x_scale[:, None])
    out = tl.trans(acc) if TRANSPOSED else acc
    offset = (first_token * G + group) * N + first_row + token[:, None] * (G * N) + row[None, :]
    mask = token_mask[:, None] & row_mask[None, :]
    if SPLITS > 1:
        size = num_tokens.to(tl.int64) * (G * N)
        tl.store(partial_ptr + split * size + offset, out, mask=mask)
        # The barrier orders the stores of all threads before the counter, which orders them before the last program's reads.
        tl.debug_barrier()
        ended = tl.atomic_add(counters_ptr + group * tl.num_programs(0) + tl.program_id(0), 1, sem="acq_rel")
        if ended == SPLITS - 1:
            tl.debug_barrier()
            out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for part in tl.static_range(SPLITS):
                out += tl.load(partial_ptr + part * size + offset, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dot(x, w, acc, TRANSPOSED: tl.constexpr):
    """acc + x · wᵀ, or its transpose."""
    return tl.dot(w, tl.trans(x), acc, input_precision="ieee") if TRANSPOSED else tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def _values(code, DTYPE: tl.constexpr, HW_FP8: tl.constexpr):
    """e4m3 codes (or their values) as ``DTYPE``."""
    if code.dtype != tl.uint8:
        value = code.to(DTYPE)
    elif tl.float8e4nv == DTYPE:
        value = code.to(tl.float8e4nv, bitcast=True)
    else:
        value = decode_e4m3(code, HW_FP8).to(DTYPE)
    return value


@triton.jit
def _tile(index, num_tokens, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tile ``index`` → its row and column among the tiles, in stripes of 8 tiles of tokens, so that neighbours share operands."""
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    stripe = index // (8 * tiles_n)
    height = tl.minimum(tiles_m - stripe * 8, 8)
    within = index % (8 * tiles_n)
    return stripe * 8 + within % height, within // height


def widen(weight: torch.Tensor, weight_sf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight [G, N, K] e4m3, weight_sf [G, ceil(N/128), ceil(K/128)] → [G, N, K] of ``dtype``: exact where scales are powers of two."""
    num_groups, size_n, size_k = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    launch(
        _widen_kernel,
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
def _widen_kernel(w_ptr, sf_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr, HW_FP8: tl.constexpr):
    """One program: 32 rows by 128 columns, of one scale."""
    group = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * 32 + tl.arange(0, 32)
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    sf = tl.load(sf_ptr + (group * ((N + 127) // 128) + tl.program_id(1) // 4) * ((K + 127) // 128) + tl.program_id(0))
    mask = (row < N)[:, None] & (column < K)[None, :]
    offset = (group * N + row[:, None]) * K + column[None, :]
    w = decode_e4m3(tl.load(w_ptr + offset, mask=mask, other=0), HW_FP8).to(tl.float32)
    tl.store(out_ptr + offset, (w * sf).to(out_ptr.dtype.element_ty), mask=mask)


def _bytes(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.uint8) if weight.dtype == torch.float8_e4m3fn else weight
