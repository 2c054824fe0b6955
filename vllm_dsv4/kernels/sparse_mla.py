"""Triton kernels of ``sparse_mla``.

A program attends with a block of heads of one token to a part of the token's slots, window columns first, then entry columns.
Each tile of entries is decoded once and serves as keys and as values. Where one part a token would leave the GPU idle there
are more, and a second kernel combines them.

The products are float16, not bfloat16: weights rounded to bfloat16 would double the error that the rounding of the result
makes. Normed queries and entries fit: both are at most sqrt(512) times a norm's weight, and what is lost below 2^-24 does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._fp8 import decode_e4m3, decode_e8m0
from vllm_dsv4.kernels._launch import Capability, capability, has_fp8, launch, num_sms
from vllm_dsv4.quantization.formats import PACKED_KV, PackedKVFormat, RowFormat, cache_format

_DATA = tl.constexpr(PACKED_KV.data_bytes)
_SCALES = tl.constexpr(PACKED_KV.scale_bytes)
_NOPE = tl.constexpr(PACKED_KV.nope_dim)
_GROUP = tl.constexpr(PACKED_KV.tile)

_LOG2_E = 1.4426950408889634
_NOTHING = tl.constexpr(-1e30)
"""The logarithm of a sum without terms: finite, so that no difference of infinities occurs."""
_MAX_SPLITS = 128
_SPLITS_AT_ONCE = 8
_SLOTS_AT_ONCE = 256


@dataclass(frozen=True)
class Tile:
    """A program's share: heads, entries in a step."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def sparse_mla(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    window_slots: torch.Tensor,
    attn_sink: torch.Tensor,
    scale: float,
    entry_cache: torch.Tensor | None = None,
    entry_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``reference/sparse_mla.py``."""
    num_tokens, num_heads, dim = q.shape
    fmt = cache_format(window_cache.dtype, window_cache.shape[-1])
    if not isinstance(fmt, PackedKVFormat | RowFormat) or fmt.head_dim != dim:
        raise ValueError(f"sparse_mla: a cache of {fmt} does not hold KV entries of {dim} columns")
    if entry_cache is None or entry_slots is None:
        entry_cache, entry_slots = window_cache, window_slots[:, :0]
    exact = torch.float32 in (q.dtype, fmt.value_dtype)
    tile = _tile(num_heads, capability(q.device), exact)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    columns = triton.cdiv(window_slots.shape[1], tile.block_n) * tile.block_n + entry_slots.shape[1]
    num_blocks = triton.cdiv(num_heads, tile.block_h)
    num_splits, split_columns = _split(columns, num_tokens * num_blocks, num_sms(q.device), tile.block_n)
    partial = log_sum = None
    if num_splits > 1:
        partial = torch.empty(num_tokens, num_splits, num_heads, dim, dtype=torch.float32 if exact else torch.float16, device=q.device)
        log_sum = torch.empty(num_tokens, num_splits, num_heads, dtype=torch.float32, device=q.device)
    launch(
        _attend_kernel,
        (num_tokens * num_blocks, num_splits),
        q,
        window_cache,
        window_slots,
        entry_cache,
        entry_slots,
        attn_sink,
        out,
        partial,
        log_sum,
        scale * _LOG2_E,
        q.stride(0),
        q.stride(1),
        window_cache.stride(0),
        entry_cache.stride(0),
        window_slots.stride(0),
        entry_slots.stride(0),
        window_slots.shape[1],
        entry_slots.shape[1],
        split_columns,
        NUM_HEADS=num_heads,
        DIM=dim,
        PACKED=isinstance(fmt, PackedKVFormat),
        WINDOW_PAGE=window_cache.shape[1],
        ENTRY_PAGE=entry_cache.shape[1],
        DOT_DTYPE=tl.float32 if exact or q.device.type == "cpu" else tl.float16,
        HW_FP8=has_fp8(q.device),
        BLOCK_H=tile.block_h,
        BLOCK_N=tile.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        SLOTS_AT_ONCE=_SLOTS_AT_ONCE,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        launch(
            _combine_kernel,
            (num_tokens * num_heads,),
            partial,
            log_sum,
            attn_sink,
            out,
            num_splits,
            NUM_HEADS=num_heads,
            DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            MAX_SPLITS=_MAX_SPLITS,
            SPLITS_AT_ONCE=_SPLITS_AT_ONCE,
            num_warps=4,
        )
    return out


def _tile(num_heads: int, gpu: Capability, exact: bool) -> Tile:
    return Tile(16, 16, 4, 1) if exact else Tile(16, 32, 4, 1)


def _split(columns: int, num_programs: int, num_sms: int, block_n: int) -> tuple[int, int]:
    """How many parts a token's columns are cut into, and the columns of each: as many as there are idle processors."""
    num_tiles = max(1, triton.cdiv(columns, block_n))
    wanted = min(num_tiles, _MAX_SPLITS, max(1, num_sms // max(1, num_programs)))
    tiles = triton.cdiv(num_tiles, wanted)
    return triton.cdiv(num_tiles, tiles), tiles * block_n


@triton.jit(
    do_not_specialize=["stride_window_slots", "stride_entry_slots", "num_window", "num_entry", "split_columns"],
)
def _attend_kernel(
    q_ptr,
    window_cache_ptr,
    window_slots_ptr,
    entry_cache_ptr,
    entry_slots_ptr,
    sink_ptr,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    scale,
    stride_q_t,
    stride_q_h,
    stride_window_page,
    stride_entry_page,
    stride_window_slots,
    stride_entry_slots,
    num_window,
    num_entry,
    split_columns,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PACKED: tl.constexpr,
    WINDOW_PAGE: tl.constexpr,
    ENTRY_PAGE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLOTS_AT_ONCE: tl.constexpr,
):
    """One program: ``BLOCK_H`` heads of one token, ``split_columns`` columns."""
    NUM_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    head = tl.program_id(0) % NUM_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    mask = (head < NUM_HEADS)[:, None] & (column < DIM)[None, :]
    q = tl.load(q_ptr + token * stride_q_t + head[:, None] * stride_q_h + column[None, :], mask=mask, other=0.0).to(DOT_DTYPE)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_H], _NOTHING, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)

    window_slots_ptr += token * stride_window_slots
    entry_slots_ptr += token * stride_entry_slots
    # Entry columns begin where a tile does.
    shift = tl.cdiv(num_window, BLOCK_N) * BLOCK_N
    begin = split * split_columns
    acc, largest, total = _attend(
        acc, largest, total, q, scale, window_cache_ptr, stride_window_page, window_slots_ptr,
        tl.minimum(begin, num_window), tl.minimum(begin + split_columns, num_window),
        DIM, PACKED, WINDOW_PAGE, DOT_DTYPE, HW_FP8, BLOCK_N, BLOCK_D, SLOTS_AT_ONCE,
    )  # fmt: skip
    begin -= shift
    acc, largest, total = _attend(
        acc, largest, total, q, scale, entry_cache_ptr, stride_entry_page, entry_slots_ptr,
        tl.maximum(begin, 0), tl.minimum(begin + split_columns, num_entry),
        DIM, PACKED, ENTRY_PAGE, DOT_DTYPE, HW_FP8, BLOCK_N, BLOCK_D, SLOTS_AT_ONCE,
    )  # fmt: skip

    row = token * NUM_HEADS + head
    if partial_ptr is None:
        sink = _finite(tl.load(sink_ptr + head, mask=head < NUM_HEADS, other=0.0))
        peak = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - peak)
        factor = shrink / (total * shrink + tl.exp2(sink - peak))
        tl.store(out_ptr + row[:, None] * DIM + column[None, :], (acc * factor[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        row = (token * tl.num_programs(1) + split) * NUM_HEADS + head
        empty = total == 0.0
        tl.store(log_sum_ptr + row, tl.where(empty, _NOTHING, largest + tl.log2(tl.where(empty, 1.0, total))), mask=head < NUM_HEADS)
        acc *= (1.0 / tl.where(empty, 1.0, total))[:, None]
        # What has no weight is not read.
        tl.store(partial_ptr + row[:, None] * DIM + column[None, :], acc.to(partial_ptr.dtype.element_ty), mask=mask & ~empty[:, None])


@triton.jit
def _attend(
    acc,
    largest,
    total,
    q,
    scale,
    cache_ptr,
    stride_page,
    slots_ptr,
    begin,
    end,
    DIM: tl.constexpr,
    PACKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLOTS_AT_ONCE: tl.constexpr,
):
    """Add the entries at the slots of columns ``begin`` .. ``end`` - 1 to a softmax that is rescaled whenever a larger score comes."""
    end = _last_present(slots_ptr, begin, end, SLOTS_AT_ONCE)
    for start in range(begin, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        slot = tl.load(slots_ptr + column, mask=column < end, other=-1)
        if PACKED:
            kv = _load_packed(cache_ptr, stride_page, slot, PAGE_SIZE, HW_FP8, DOT_DTYPE, BLOCK_N, BLOCK_D)
        else:
            kv = _load_rows(cache_ptr, stride_page, slot, PAGE_SIZE, DIM, BLOCK_D).to(DOT_DTYPE)
        scores = tl.dot(q, tl.trans(kv), input_precision="tf32x3") * scale
        scores = tl.where((slot >= 0)[None, :], scores, float("-inf"))
        before = largest
        largest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(before - largest)
        weights = tl.exp2(scores - largest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DOT_DTYPE), kv, acc * shrink[:, None], input_precision="tf32x3")
    return acc, largest, total


@triton.jit
def _last_present(slots_ptr, begin, end, SLOTS_AT_ONCE: tl.constexpr):
    """``end`` without the absent columns at the end: what is only padded, to the longest request, costs next to nothing."""
    last = begin
    for start in range(begin, end, SLOTS_AT_ONCE):
        column = start + tl.arange(0, SLOTS_AT_ONCE)
        slot = tl.load(slots_ptr + column, mask=column < end, other=-1)
        last = tl.maximum(last, tl.max(tl.where(slot >= 0, column + 1, begin)))
    return last


@triton.jit
def _load_rows(cache_ptr, stride_page, slot, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Entries [BLOCK_N, BLOCK_D] of a cache of plain rows; zeros where there is none."""
    present = slot >= 0
    slot = tl.where(present, slot, 0)
    row = cache_ptr + (slot // PAGE_SIZE).to(tl.int64) * stride_page + slot % PAGE_SIZE * DIM
    column = tl.arange(0, BLOCK_D)
    return tl.load(row[:, None] + column[None, :], mask=present[:, None] & (column < DIM)[None, :], other=0.0)


@triton.jit
def _load_packed(
    cache_ptr,
    stride_page,
    slot,
    PAGE_SIZE: tl.constexpr,
    HW_FP8: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Entries [BLOCK_N, BLOCK_D] of a packed cache, decoded; zeros where there is none."""
    present = slot >= 0
    slot = tl.where(present, slot, 0)
    page = cache_ptr + (slot // PAGE_SIZE).to(tl.int64) * stride_page
    index = slot % PAGE_SIZE
    data = page + index * _DATA
    column = tl.arange(0, BLOCK_D)
    is_nope = (column < _NOPE)[None, :]
    code = tl.load(data[:, None] + column[None, :], mask=present[:, None] & is_nope, other=0)
    rope_ptr = (data + _NOPE).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    rope = tl.load(rope_ptr[:, None] + (column - _NOPE)[None, :], mask=present[:, None] & ~is_nope, other=0.0)
    group = tl.arange(0, BLOCK_D // _GROUP)
    scale_ptr = page + PAGE_SIZE * _DATA + index * _SCALES
    scale = decode_e8m0(tl.load(scale_ptr[:, None] + group[None, :], mask=present[:, None], other=127)).to(DOT_DTYPE)
    nope = decode_e4m3(code, HW_FP8).to(DOT_DTYPE).reshape(BLOCK_N, BLOCK_D // _GROUP, _GROUP) * scale[:, :, None]
    return tl.where(is_nope, nope.reshape(BLOCK_N, BLOCK_D), rope.to(DOT_DTYPE))


@triton.jit
def _finite(sink):
    """A sink as a power of two's exponent; infinities become large numbers, NaN stays."""
    sink *= 1.4426950408889634
    return tl.where(sink > 1e30, 1e30, tl.where(sink < _NOTHING, _NOTHING, sink))


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    partial_ptr,
    log_sum_ptr,
    sink_ptr,
    out_ptr,
    num_splits,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
):
    """One program: one head of one token; the parts are added in their order."""
    token = (tl.program_id(0) // NUM_HEADS).to(tl.int64)
    head = tl.program_id(0) % NUM_HEADS
    partial_ptr += (token * num_splits * NUM_HEADS + head) * DIM
    log_sum_ptr += token * num_splits * NUM_HEADS + head
    split = tl.arange(0, MAX_SPLITS)
    log_sum = tl.load(log_sum_ptr + split * NUM_HEADS, mask=split < num_splits, other=_NOTHING)
    sink = _finite(tl.load(sink_ptr + head))
    peak = tl.maximum(tl.max(log_sum), sink)
    total = tl.sum(tl.exp2(log_sum - peak)) + tl.exp2(sink - peak)
    column = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, SPLITS_AT_ONCE):
        part = start + tl.arange(0, SPLITS_AT_ONCE)
        exponent = tl.load(log_sum_ptr + part * NUM_HEADS, mask=part < num_splits, other=_NOTHING)
        present = (exponent != _NOTHING)[:, None] & (column < DIM)[None, :]
        partial = tl.load(partial_ptr + part[:, None] * (NUM_HEADS * DIM) + column[None, :], mask=present, other=0.0)
        acc += tl.sum(partial.to(tl.float32) * tl.exp2(exponent - peak)[:, None], 0)
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * DIM + column, out, mask=column < DIM)
