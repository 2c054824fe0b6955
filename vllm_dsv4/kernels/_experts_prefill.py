"""Triton kernels of ``experts`` for many tokens: the pairs of token and expert sorted by expert, then two grouped products.

A *pair* is ``token * topk + choice``. Products are transposed: a tile has 128 rows of the weight and BLOCK_M pairs of one expert,
because a tensor core takes its left operand from registers, and that is where weights are unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._fp8 import decode_e4m3, fp8_scale_exponent, largest_magnitude, pow2, quantize_e4m3
from vllm_dsv4.kernels._launch import capability, dot_dtype, has_fp8, launch
from vllm_dsv4.kernels._mxfp4 import UNDO_SHIFT, unpack_mxfp4
from vllm_dsv4.kernels.swiglu import clamped_swiglu

_GROUP = tl.constexpr(128)
"""Columns of a quantisation group, columns and rows of a block-FP8 scale, and rows of a weight's tile."""
_PLAIN, _FP8, _MXFP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class _Config:
    """Tile of a grouped product: pairs, whether half a tile will do for at most half as many, columns in a step of the sum."""

    block_m: int
    halve: bool
    block_k: int
    num_warps: int
    num_stages: int


def experts_prefill(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_sf: torch.Tensor | None,
    w2_sf: torch.Tensor | None,
    swiglu_limit: float,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """See ``reference/experts.py``; sums are float32, so the result is [T, D] float32."""
    num_tokens, hidden_size = x.shape
    num_experts, intermediate = w13.shape[0], w13.shape[1] // 2
    topk = topk_ids.shape[1]
    num_pairs = num_tokens * topk
    kind = _PLAIN if w13_sf is None else _MXFP4 if w13.dtype == torch.uint8 else _FP8
    out = torch.empty(num_tokens, hidden_size, dtype=torch.float32, device=x.device)
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()

    config = _config(x.device, kind.value, num_pairs, num_experts, x.dtype)
    pairs, starts, tile_experts = _sort_by_expert(topk_ids, expert_map, num_experts, config.block_m)
    inputs = x if kind.value == 0 else _quantize(x, kind)
    padded = intermediate if kind.value == 0 else triton.cdiv(intermediate, 128) * 128
    hidden = torch.empty(num_pairs, padded, dtype=x.dtype if kind.value == 0 else torch.bfloat16, device=x.device)
    y = torch.empty(num_pairs, hidden_size, dtype=x.dtype, device=x.device)
    num_tiles = len(tile_experts)
    options = {
        "KIND": kind,
        "BLOCK_M": config.block_m,
        "HALVE": config.halve,
        "BLOCK_K": config.block_k,
        "DTYPE": _product_dtype(x, kind),
        "HW_FP8": has_fp8(x.device),
        "MMA_VERSION": _mma_version(x.device),
        "NUM_WARPS": config.num_warps,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    launch(
        _gate_up_kernel,
        (triton.cdiv(intermediate, 128), num_tiles),
        inputs,
        inputs.stride(0),
        *_stored(w13, w13_sf),
        pairs,
        starts,
        tile_experts,
        topk_weights,
        hidden,
        x.new_empty(0),
        K=hidden_size,
        N=intermediate,
        LIMIT=float(swiglu_limit),
        TOPK=topk,
        **options,
    )
    launch(
        _down_kernel,
        (triton.cdiv(hidden_size, 256), num_tiles),
        hidden,
        hidden.stride(0),
        *_stored(w2, w2_sf),
        pairs,
        starts,
        tile_experts,
        y,
        K=intermediate,
        N=hidden_size,
        **options,
    )
    launch(
        _sum_kernel,
        (num_tokens, triton.cdiv(hidden_size, 1024)),
        y,
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        out,
        WIDTH=hidden_size,
        TOPK=topk,
        HAS_MAP=expert_map is not None,
        BLOCK=1024,
        num_warps=4,
    )
    return out


def _config(device: torch.device, kind: int, num_pairs: int, num_experts: int, dtype: torch.dtype) -> _Config:
    """By the mean number of pairs of an expert, and what fits in shared memory."""
    rows = num_pairs / num_experts
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    large = capability(device)[0] in (9, 10)
    if not large:
        block_m = min(block_m, 64)
    block_k = (16 if dtype == torch.float32 else 64) if kind == 0 else 128
    return _Config(block_m, False, block_k, 8, 3 if large else 2)


def _mma_version(device: torch.device) -> int:
    """Triton's number of the tensor core's instructions: 3 (Hopper) and 5 (data-centre Blackwell) are asynchronous."""
    return {9: 3, 10: 5}.get(capability(device)[0], 2)


def _product_dtype(x: torch.Tensor, kind: tl.constexpr) -> tl.dtype:
    if kind.value != 0 or x.dtype == torch.bfloat16:
        return dot_dtype(x.device)
    return tl.float16 if x.dtype == torch.float16 else tl.float32


def _stored(weight: torch.Tensor, sf: torch.Tensor | None) -> tuple[torch.Tensor, int, torch.Tensor, int]:
    """A stack of weights as a kernel takes it: bytes, scales, and the strides between experts."""
    weight = weight if sf is None else weight.view(torch.uint8)
    if sf is None:
        return weight, weight.stride(0), weight, 0
    if sf.dtype == torch.uint8 and sf.shape[-1] % 4 == 0:
        sf = sf.view(torch.int32)  # the four scales of a group at once
    return weight, weight.stride(0), sf, sf.stride(0)


def _sort_by_expert(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """→ pairs [T * topk] int32, those of an expert together and in order; where each expert's begin [E + 1] int32; the expert of
    each tile of ``block_m`` pairs, int32, -1 = none."""
    num_pairs = topk_ids.numel()
    empty = lambda size: torch.empty(size, dtype=torch.int32, device=topk_ids.device)  # noqa: E731
    num_tiles = triton.cdiv(num_pairs, block_m) + num_experts if num_pairs else 0
    pairs, starts, tile_experts = empty(num_pairs), empty(num_experts + 1), empty(num_tiles)
    launch(
        _sort_kernel,
        (num_experts if num_pairs else 0,),
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        pairs,
        starts,
        tile_experts,
        num_pairs,
        num_tiles,
        HAS_MAP=expert_map is not None,
        BLOCK_M=block_m,
        BLOCK=4096,
        num_warps=8,
    )
    return pairs, starts, tile_experts


def _quantize(x: torch.Tensor, kind: tl.constexpr) -> torch.Tensor:
    """x after quantisation in groups of 128, exactly, in bfloat16; short groups filled with zeros."""
    num_tokens, width = x.shape
    num_groups = triton.cdiv(width, 128)
    q = torch.empty(num_tokens, num_groups * 128, dtype=torch.bfloat16, device=x.device)
    launch(
        _quantize_kernel,
        (num_tokens, triton.cdiv(num_groups, 8)),
        x,
        q,
        x.stride(0),
        WIDTH=width,
        KIND=kind,
        GROUPS=8,
        HW_FP8=has_fp8(x.device),
        MMA_VERSION=_mma_version(x.device),
        num_warps=4,
    )
    return q


@triton.jit
def _local_ids(topk_ids_ptr, expert_map_ptr, pair, mask, HAS_MAP: tl.constexpr):
    """Indices into the weights of pairs' experts; -1 = none, or not here."""
    ids = tl.load(topk_ids_ptr + pair, mask=mask, other=-1)
    if HAS_MAP:
        ids = tl.load(expert_map_ptr + ids, mask=ids >= 0, other=-1)
    return ids


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort_kernel(
    topk_ids_ptr,
    expert_map_ptr,
    pairs_ptr,
    starts_ptr,
    tile_experts_ptr,
    num_pairs,
    num_tiles,
    HAS_MAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one expert. Its first place is the number of pairs of the experts before it."""
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        ids = _local_ids(topk_ids_ptr, expert_map_ptr, begin + offsets, begin + offsets < num_pairs, HAS_MAP)
        before += ((ids >= 0) & (ids < expert)).to(tl.int32)
    start = tl.sum(before)
    place = start
    for begin in range(0, num_pairs, BLOCK):
        ids = _local_ids(topk_ids_ptr, expert_map_ptr, begin + offsets, begin + offsets < num_pairs, HAS_MAP)
        hit = (ids == expert).to(tl.int32)
        tl.store(pairs_ptr + place + tl.cumsum(hit) - 1, begin + offsets, mask=hit != 0)
        place += tl.sum(hit)
    tl.store(starts_ptr + expert, start)
    next_tile = _first_tile(place, expert + 1, BLOCK_M)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, place)
        next_tile = num_tiles
    for begin in range(_first_tile(start, expert, BLOCK_M), next_tile, BLOCK):
        tile = begin + offsets
        first = start + (tile - _first_tile(start, expert, BLOCK_M)) * BLOCK_M
        tl.store(tile_experts_ptr + tile, tl.where(first < place, expert, -1), mask=tile < next_tile)


@triton.jit
def _first_tile(start, expert, BLOCK_M: tl.constexpr):
    """Index of an expert's first tile: at least as many as the experts before it need, known without their numbers of pairs."""
    return start // BLOCK_M + expert


@triton.jit
def _stored_column(position, MMA_VERSION: tl.constexpr):
    """Which column of a group of 128 stands at ``position`` of an activation that meets MXFP4 weights.

    ``unpack_mxfp4`` gives even and odd columns apart, and a thread that holds 16 adjacent bytes of a weight, the q-th of four,
    has what four steps j of its tensor core take from it: byte 16 q + 4 j + 2 i + h of 64 is column 16 j + 4 q + 2 i + h of the
    operand, or 16 j + 8 i + 2 q + h for Hopper's instructions.
    """
    if MMA_VERSION == 3:
        byte = ((position >> 1) & 3) * 16 + ((position >> 4) & 3) * 4 + ((position >> 3) & 1) * 2 + (position & 1)
    else:
        byte = ((position >> 2) & 3) * 16 + ((position >> 4) & 3) * 4 + (position & 3)
    return 2 * byte + (position >> 6)


@triton.jit
def _round_trip(x, exponent, HW_FP8: tl.constexpr):
    """float32 → what is left of it after quantisation to e4m3 with the scale 2^exponent, float32."""
    scale = pow2(tl.minimum(exponent, 127))
    return decode_e4m3(quantize_e4m3(x, exponent, HW_FP8), HW_FP8).to(tl.float32) * scale


@triton.jit
def _quantize_kernel(
    x_ptr,
    q_ptr,
    stride_x,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    HW_FP8: tl.constexpr,
    MMA_VERSION: tl.constexpr,
):
    """One program: ``GROUPS`` groups of one token."""
    NUM_GROUPS: tl.constexpr = (WIDTH + _GROUP - 1) // _GROUP
    token = tl.program_id(0).to(tl.int64)
    groups = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    position = tl.arange(0, _GROUP)[None, :]
    column = groups * _GROUP + (_stored_column(position, MMA_VERSION) if KIND == _MXFP4 else position)
    x = tl.load(x_ptr + token * stride_x + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    exponent = fp8_scale_exponent(largest_magnitude(x, 1))[:, None]
    q = _round_trip(x, exponent, HW_FP8)
    tl.store(q_ptr + token * NUM_GROUPS * _GROUP + groups * _GROUP + position, q.to(tl.bfloat16), mask=groups < NUM_GROUPS)


@triton.jit
def _find_tile(starts_ptr, tile_experts_ptr, BLOCK_M: tl.constexpr):
    """→ (expert or -1, first place, end of the expert's places) of this program's tile."""
    tile = tl.program_id(1)
    expert = tl.load(tile_experts_ptr + tile)
    start = tl.load(starts_ptr + tl.maximum(expert, 0))
    return expert, start + (tile - _first_tile(start, expert, BLOCK_M)) * BLOCK_M, tl.load(starts_ptr + expert + 1)


@triton.jit
def _tile_rows(NUM_WARPS: tl.constexpr):
    """Rows of a weight in the order in which threads load them: [..., 2, warps, 8], where the tensor core's order, which
    ``_as_operand`` restores, is [..., warps, 2, 8]."""
    row = tl.arange(0, _GROUP)
    warp = (row // 8) % NUM_WARPS
    half = (row // (8 * NUM_WARPS)) % 2
    return row // (16 * NUM_WARPS) * (16 * NUM_WARPS) + (warp * 2 + half) * 8 + row % 8


@triton.jit
def _as_operand(weight, MMA_VERSION: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Unpacked [128, 64], rows as of ``_tile_rows`` → rows in order, columns as of ``_stored_column``. No data moves: every
    thread already holds its part."""
    weight = weight.reshape(_GROUP // (16 * NUM_WARPS), 2, NUM_WARPS, 8, 4, 4, 2, 2)
    if MMA_VERSION == 3:
        return weight.permute(0, 2, 1, 3, 5, 6, 4, 7).reshape(_GROUP, 64)
    else:
        return weight.permute(0, 2, 1, 3, 5, 4, 6, 7).reshape(_GROUP, 64)


@triton.jit
def _accumulate(
    acc,
    x_rows,
    w_rows,
    sf_rows,
    step,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    MMA_VERSION: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """``acc`` [128, BLOCK_M] += weight · xᵀ over ``BLOCK_K`` columns; the rows are pointers [128] and [BLOCK_M]."""
    if KIND == _MXFP4:
        byte = step * 64 + tl.arange(0, 64)[None, :]
        block = tl.arange(0, 4)[None, :]
        if K % 128 == 0:
            packed = tl.load(w_rows[:, None] + byte)
            sf = (tl.load(sf_rows + step)[:, None] >> (block * 8)) & 255
        else:
            packed = tl.load(w_rows[:, None] + byte, mask=byte < K // 2, other=0)
            sf = tl.load(sf_rows[:, None] + step * 4 + block, mask=step * 4 + block < K // 32, other=0)
        even, odd = unpack_mxfp4(packed, sf, DTYPE)
        even, odd = _as_operand(even, MMA_VERSION, NUM_WARPS), _as_operand(odd, MMA_VERSION, NUM_WARPS)
        if MMA_VERSION == 5:  # one product, as Triton copies a sum that two products of a step add to
            x = tl.load(x_rows[:, None] + step * 128 + tl.arange(0, 128)[None, :])
            acc = tl.dot(tl.join(even, odd).permute(0, 2, 1).reshape(_GROUP, 128), x.T, acc)
        else:
            acc = tl.dot(even, tl.load(x_rows[:, None] + step * 128 + tl.arange(0, 64)[None, :]).to(DTYPE).T, acc)
            acc = tl.dot(odd, tl.load(x_rows[:, None] + step * 128 + tl.arange(64, 128)[None, :]).to(DTYPE).T, acc)
    else:
        column = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        if K % BLOCK_K == 0:
            x = tl.load(x_rows[:, None] + column)
            weight = tl.load(w_rows[:, None] + column)
        else:
            x = tl.load(x_rows[:, None] + column, mask=column < K, other=0)
            weight = tl.load(w_rows[:, None] + column, mask=column < K, other=0)
        if KIND == _FP8:
            part = tl.dot(decode_e4m3(weight, HW_FP8).to(DTYPE), x.to(DTYPE).T)
            acc += part * tl.load(sf_rows + step)[:, None]
        else:
            acc = tl.dot(weight.to(DTYPE), x.to(DTYPE).T, acc, input_precision="ieee")
    return acc


@triton.jit
def _weight_rows(w_ptr, sf_ptr, row, K: tl.constexpr, KIND: tl.constexpr):
    """Where rows of one expert's weight, and their scales, begin."""
    if KIND == _MXFP4:
        return w_ptr + row * (K // 2), sf_ptr + row * (K // 128 if K % 128 == 0 else K // 32)
    elif KIND == _FP8:
        return w_ptr + row * K, sf_ptr + row // 128 * ((K + 127) // 128)
    else:
        return w_ptr + row * K, sf_ptr


@triton.jit
def _two_products(
    x_rows,
    w_ptr,
    sf_ptr,
    low_row,
    high_row,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    MMA_VERSION: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Two tiles [128, BLOCK_M] of weight · xᵀ, of the rows ``low_row`` and ``high_row`` of one expert's weight."""
    low_rows, low_sf_rows = _weight_rows(w_ptr, sf_ptr, low_row, K, KIND)
    high_rows, high_sf_rows = _weight_rows(w_ptr, sf_ptr, high_row, K, KIND)
    low = tl.zeros((_GROUP, BLOCK_M), tl.float32)
    high = tl.zeros((_GROUP, BLOCK_M), tl.float32)
    for step in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        low = _accumulate(low, x_rows, low_rows, low_sf_rows, step, K, KIND, BLOCK_K, DTYPE, HW_FP8, MMA_VERSION, NUM_WARPS)
        high = _accumulate(high, x_rows, high_rows, high_sf_rows, step, K, KIND, BLOCK_K, DTYPE, HW_FP8, MMA_VERSION, NUM_WARPS)
    if KIND == _MXFP4:
        low *= UNDO_SHIFT
        high *= UNDO_SHIFT
    return low, high


@triton.jit
def _gate_up_tile(
    x_ptr,
    stride_x,
    w_ptr,
    sf_ptr,
    pairs_ptr,
    topk_weights_ptr,
    hidden_ptr,
    rounded_ptr,
    first,
    end,
    K: tl.constexpr,
    N: tl.constexpr,
    LIMIT: tl.constexpr,
    KIND: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    MMA_VERSION: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    place = first + tl.arange(0, BLOCK_M)
    pair = tl.load(pairs_ptr + tl.minimum(place, end - 1))
    x_rows = x_ptr + (pair // TOPK).to(tl.int64) * stride_x
    order = tl.arange(0, _GROUP)
    if KIND == _MXFP4:
        # What this program stores, the next product takes as columns.
        order = _stored_column(_tile_rows(NUM_WARPS), MMA_VERSION)
    row = tl.minimum(tl.program_id(0) * _GROUP + order, N - 1)
    gate, up = _two_products(x_rows, w_ptr, sf_ptr, row, row + N, K, KIND, BLOCK_M, BLOCK_K, DTYPE, HW_FP8, MMA_VERSION, NUM_WARPS, STAGES)
    ROUNDED: tl.constexpr = rounded_ptr.dtype.element_ty
    gate, up = gate.to(ROUNDED).to(tl.float32), up.to(ROUNDED).to(tl.float32)
    weight = tl.load(topk_weights_ptr + pair)
    hidden = (clamped_swiglu(gate, up, LIMIT) * weight[None, :]).to(ROUNDED).to(tl.float32)
    position = tl.arange(0, _GROUP)
    WIDTH: tl.constexpr = N if KIND == _PLAIN else (N + _GROUP - 1) // _GROUP * _GROUP
    if KIND != _PLAIN:
        if N % 128 != 0:
            column = tl.program_id(0) * _GROUP + (_stored_column(position, MMA_VERSION) if KIND == _MXFP4 else position)
            hidden = tl.where((column < N)[:, None], hidden, 0.0)
        exponent = fp8_scale_exponent(largest_magnitude(hidden, 0))[None, :]
        hidden = _round_trip(hidden, exponent, HW_FP8)
    position += tl.program_id(0) * _GROUP
    pointers = hidden_ptr + place.to(tl.int64)[None, :] * WIDTH + position[:, None]
    tl.store(pointers, hidden.to(hidden_ptr.dtype.element_ty), mask=(place < end)[None, :] & (position < WIDTH)[:, None])


@triton.jit
def _gate_up_kernel(
    x_ptr,
    stride_x,
    w_ptr,
    stride_w,
    sf_ptr,
    stride_sf,
    pairs_ptr,
    starts_ptr,
    tile_experts_ptr,
    topk_weights_ptr,
    hidden_ptr,
    rounded_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    LIMIT: tl.constexpr,
    KIND: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HALVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    MMA_VERSION: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: one group of 128 columns of the weighted activation, for ``BLOCK_M`` pairs, quantised again."""
    expert, first, end = _find_tile(starts_ptr, tile_experts_ptr, BLOCK_M)
    if expert < 0:
        return
    w_ptr += expert.to(tl.int64) * stride_w
    sf_ptr += expert.to(tl.int64) * stride_sf
    if HALVE and end - first <= BLOCK_M // 2:
        _gate_up_tile(
            x_ptr, stride_x, w_ptr, sf_ptr, pairs_ptr, topk_weights_ptr, hidden_ptr, rounded_ptr, first, end,
            K, N, LIMIT, KIND, TOPK, BLOCK_M // 2, BLOCK_K, DTYPE, HW_FP8, MMA_VERSION, NUM_WARPS, STAGES,
        )  # fmt: skip
    else:
        _gate_up_tile(
            x_ptr, stride_x, w_ptr, sf_ptr, pairs_ptr, topk_weights_ptr, hidden_ptr, rounded_ptr, first, end,
            K, N, LIMIT, KIND, TOPK, BLOCK_M, BLOCK_K, DTYPE, HW_FP8, MMA_VERSION, NUM_WARPS, STAGES,
        )  # fmt: skip


@triton.jit
def _down_tile(
    x_ptr,
    stride_x,
    w_ptr,
    sf_ptr,
    pairs_ptr,
    y_ptr,
    first,
    end,
    K: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    MMA_VERSION: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    place = first + tl.arange(0, BLOCK_M)
    mask = (place < end)[None, :]
    place = tl.minimum(place, end - 1)
    order = tl.arange(0, _GROUP)
    if KIND == _MXFP4:
        order = _tile_rows(NUM_WARPS)
    row = tl.program_id(0) * 2 * _GROUP + order
    low_row, high_row = tl.minimum(row, N - 1), tl.minimum(row + _GROUP, N - 1)
    x_rows = x_ptr + place.to(tl.int64) * stride_x
    low, high = _two_products(
        x_rows, w_ptr, sf_ptr, low_row, high_row, K, KIND, BLOCK_M, BLOCK_K, DTYPE, HW_FP8, MMA_VERSION, NUM_WARPS, STAGES
    )
    column = (tl.program_id(0) * 2 * _GROUP + tl.arange(0, _GROUP))[:, None]
    pointers = y_ptr + tl.load(pairs_ptr + place).to(tl.int64)[None, :] * N + column
    tl.store(pointers, low.to(y_ptr.dtype.element_ty), mask=mask & (column < N))
    tl.store(pointers + _GROUP, high.to(y_ptr.dtype.element_ty), mask=mask & (column + _GROUP < N))


@triton.jit
def _down_kernel(
    x_ptr,
    stride_x,
    w_ptr,
    stride_w,
    sf_ptr,
    stride_sf,
    pairs_ptr,
    starts_ptr,
    tile_experts_ptr,
    y_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HALVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    MMA_VERSION: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: 256 columns of what an expert gives, for ``BLOCK_M`` pairs, each stored at its pair's row of y."""
    expert, first, end = _find_tile(starts_ptr, tile_experts_ptr, BLOCK_M)
    if expert < 0:
        return
    w_ptr += expert.to(tl.int64) * stride_w
    sf_ptr += expert.to(tl.int64) * stride_sf
    if HALVE and end - first <= BLOCK_M // 2:
        _down_tile(
            x_ptr, stride_x, w_ptr, sf_ptr, pairs_ptr, y_ptr, first, end,
            K, N, KIND, BLOCK_M // 2, BLOCK_K, DTYPE, HW_FP8, MMA_VERSION, NUM_WARPS, STAGES,
        )  # fmt: skip
    else:
        _down_tile(
            x_ptr, stride_x, w_ptr, sf_ptr, pairs_ptr, y_ptr, first, end,
            K, N, KIND, BLOCK_M, BLOCK_K, DTYPE, HW_FP8, MMA_VERSION, NUM_WARPS, STAGES,
        )  # fmt: skip


@triton.jit
def _sum_kernel(
    y_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: ``BLOCK`` columns of one token, summed over its experts on this rank in the order of topk_ids."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOPK):
        pair = token * TOPK + choice
        width = tl.where(_local_ids(topk_ids_ptr, expert_map_ptr, pair, True, HAS_MAP) >= 0, WIDTH, 0)
        out += tl.load(y_ptr + pair * WIDTH + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, out, mask=column < WIDTH)
