"""Triton kernels of ``sparse_mla``.

A program attends with a block of heads of one token to a part of the token's slots, window columns first, then entry columns.
Each tile of entries is decoded once and serves as keys and as values. Where one part a token would leave the GPU idle there
are more, and a second kernel combines them.

The products are float16, not bfloat16: weights rounded to bfloat16 would double the error that the rounding of the result
makes. Normed queries and entries fit: both are at most sqrt(512) times a norm's weight, and what is lost below 2^-24 does not count.

Where there are warp group products (Hopper), a program takes all heads, so that an entry is decoded once. For Triton to give
them the shape that fits registers and shared memory, the kernel says some things in a roundabout way:
- queries, once converted, go through memory, since Triton keeps an operand in registers unless it comes from a load;
- products stand in a loop of one pass: products in the same loop body are issued together and waited for once, and a product
  whose result another one does not read in that body is divided among both warp groups.
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
_SPLITS_AT_ONCE = 4
_SLOTS_AT_ONCE = 1024
_PREFETCHES = tl.constexpr(4)
"""Requests to L2 that the data of an entry is divided into: as many as there are threads for each entry of a tile."""


@dataclass(frozen=True)
class Tile:
    """A program's share: heads, entries in a step, and the pieces, powers of two, that the columns of an entry are cut into."""

    block_h: int
    block_n: int
    num_warps: int
    widths: tuple[int, ...]
    warp_groups: bool = False


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
    packed = isinstance(fmt, PackedKVFormat)
    tile = _tile(num_heads, dim, capability(q.device), packed, exact)
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
        1,
        NUM_HEADS=num_heads,
        DIM=dim,
        WIDTHS=tile.widths,
        PACKED=packed,
        WINDOW_PAGE=window_cache.shape[1],
        ENTRY_PAGE=entry_cache.shape[1],
        DOT_DTYPE=tl.float32 if exact or q.device.type == "cpu" else tl.float16,
        HW_FP8=has_fp8(q.device),
        BLOCK_H=tile.block_h,
        BLOCK_N=tile.block_n,
        SLOTS_AT_ONCE=_SLOTS_AT_ONCE,
        WARP_GROUPS=tile.warp_groups and q.device.type != "cpu",
        PREFETCH=tile.warp_groups and q.device.type != "cpu" and _is_aligned(window_cache) and _is_aligned(entry_cache),
        num_warps=tile.num_warps,
        num_stages=1,
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


def _tile(num_heads: int, dim: int, gpu: Capability, packed: bool, exact: bool) -> Tile:
    """The fixed choices: the largest tiles that compile without spills."""
    if exact or dim % 64:
        width = min(64, max(16, triton.next_power_of_2(dim)))
        return Tile(16, 16, 8, (width,) * triton.cdiv(dim, width))
    if packed and gpu[0] == 9 and num_heads > 32:
        return Tile(64, 32, 8, (256, 128, 64, 64), warp_groups=True)
    return Tile(16, 32, 8, (256, 128, 64, 64)) if packed else Tile(16, 32, 4, (triton.next_power_of_2(dim),))


def _split(columns: int, num_programs: int, num_sms: int, block_n: int) -> tuple[int, int]:
    """How many parts a token's columns are cut into, and the columns of each: as many as there are idle processors."""
    num_tiles = max(1, triton.cdiv(columns, block_n))
    wanted = min(num_tiles, _MAX_SPLITS, max(1, num_sms // max(1, num_programs)))
    tiles = triton.cdiv(num_tiles, wanted)
    return triton.cdiv(num_tiles, tiles), tiles * block_n


def _is_aligned(cache: torch.Tensor) -> bool:
    """Whether the data of every entry begins at a multiple of 16 bytes, as the copy engine wants it."""
    return cache.stride(0) % 16 == 0 and cache.storage_offset() % 16 == 0


@triton.jit(do_not_specialize=["stride_window_slots", "stride_entry_slots", "num_window", "num_entry", "split_columns", "one_pass"])
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
    one_pass,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTHS: tl.constexpr,
    PACKED: tl.constexpr,
    WINDOW_PAGE: tl.constexpr,
    ENTRY_PAGE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLOTS_AT_ONCE: tl.constexpr,
    WARP_GROUPS: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """One program: ``BLOCK_H`` heads of one token, ``split_columns`` columns."""
    NUM_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    head = tl.program_id(0) % NUM_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)

    # The part's columns. Entry columns begin where a tile does.
    window_slots_ptr += token * stride_window_slots
    entry_slots_ptr += token * stride_entry_slots
    begin = split * split_columns
    window_begin = tl.minimum(begin, num_window)
    window_end = tl.minimum(begin + split_columns, num_window)
    begin -= tl.cdiv(num_window, BLOCK_N) * BLOCK_N
    entry_begin = tl.maximum(begin, 0)
    entry_end = _last_present(entry_slots_ptr, entry_begin, tl.minimum(begin + split_columns, num_entry), SLOTS_AT_ONCE)
    window_tiles = tl.cdiv(window_end - window_begin, BLOCK_N)
    num_tiles = window_tiles + tl.cdiv(tl.maximum(entry_end - entry_begin, 0), BLOCK_N)
    # Entry columns are counted from the first tile, too.
    entry_begin -= window_tiles * BLOCK_N
    if PREFETCH:
        slot = _tile_slots(
            window_slots_ptr, window_begin, window_end, entry_slots_ptr, entry_begin, entry_end, window_tiles > 0, 0, BLOCK_N
        )
        _prefetch(
            slot,
            window_tiles > 0,
            window_cache_ptr,
            stride_window_page,
            WINDOW_PAGE,
            entry_cache_ptr,
            stride_entry_page,
            ENTRY_PAGE,
            BLOCK_N,
        )

    is_head = (head < NUM_HEADS)[:, None]
    q_row = (q_ptr + token * stride_q_t + head * stride_q_h)[:, None]
    out_row = (out_ptr + (token * NUM_HEADS + head) * DIM)[:, None]
    q = _no_pieces()
    acc = _no_pieces()
    for piece in tl.static_range(len(WIDTHS)):
        column = _offset(WIDTHS, piece) + tl.arange(0, _width(WIDTHS, piece))[None, :]
        mask = is_head & (column < DIM)
        part = tl.load(q_row + column, mask=mask, other=0.0)
        if WARP_GROUPS:
            # Other parts of the token write the same bits there before one of them, or their combination, writes the result.
            converted_ptr = (out_row + column).to(tl.pointer_type(DOT_DTYPE), bitcast=True)
            tl.store(converted_ptr, _to_dot(part, DOT_DTYPE), mask=mask)
            tl.debug_barrier()
            part = tl.load(converted_ptr, mask=mask, other=0.0)
        q = q + (part.to(DOT_DTYPE),)
        acc = acc + (tl.zeros([BLOCK_H, _width(WIDTHS, piece)], tl.float32),)
    largest = tl.full([BLOCK_H], _NOTHING, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)

    # A softmax that is rescaled whenever a larger score comes.
    for tile in range(num_tiles):
        in_window = tile < window_tiles
        slot = _tile_slots(window_slots_ptr, window_begin, window_end, entry_slots_ptr, entry_begin, entry_end, in_window, tile, BLOCK_N)
        page, index, page_size = _place(
            slot, in_window, window_cache_ptr, stride_window_page, WINDOW_PAGE, entry_cache_ptr, stride_entry_page, ENTRY_PAGE
        )
        if PACKED:
            kv = _load_packed(page, index, page_size, slot >= 0, WIDTHS, HW_FP8, DOT_DTYPE, BLOCK_N)
        else:
            kv = _load_rows(page + index * DIM, slot >= 0, DIM, WIDTHS, DOT_DTYPE)
        if PREFETCH:
            in_window = tile + 1 < window_tiles
            next_slot = _tile_slots(
                window_slots_ptr, window_begin, window_end, entry_slots_ptr, entry_begin, entry_end, in_window, tile + 1, BLOCK_N
            )
            _prefetch(
                next_slot,
                in_window,
                window_cache_ptr,
                stride_window_page,
                WINDOW_PAGE,
                entry_cache_ptr,
                stride_entry_page,
                ENTRY_PAGE,
                BLOCK_N,
            )
        scores = _scores(q, kv, one_pass, BLOCK_H, BLOCK_N, len(WIDTHS), WARP_GROUPS)
        scores = tl.where((slot >= 0)[None, :], scores * scale, float("-inf"))
        before = largest
        largest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(before - largest)
        weights = tl.exp2(scores - largest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        weights = _to_dot(weights, DOT_DTYPE)
        shrunk = _no_pieces()
        for piece in tl.static_range(len(WIDTHS)):
            shrunk = shrunk + (acc[piece] * shrink[:, None],)
        acc = shrunk
        if WARP_GROUPS:
            for _ in tl.range(one_pass, loop_unroll_factor=1):
                acc = _accumulate(acc, weights, kv, len(WIDTHS))
        else:
            acc = _accumulate(acc, weights, kv, len(WIDTHS))

    if partial_ptr is None:
        sink = _finite(tl.load(sink_ptr + head, mask=head < NUM_HEADS, other=0.0))
        peak = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - peak)
        factor = shrink / (total * shrink + tl.exp2(sink - peak))
        # As ``out_row``, whose pointers the compiler would keep in registers throughout the loop if it saw that.
        row = out_ptr + ((token * one_pass * NUM_HEADS + head) * DIM)[:, None]
    else:
        part = (token * tl.num_programs(1) + split) * NUM_HEADS + head
        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        tl.store(log_sum_ptr + part, tl.where(empty, _NOTHING, largest + tl.log2(total)), mask=head < NUM_HEADS)
        factor = 1.0 / total
        row = partial_ptr + part[:, None] * DIM
        # What has no weight is not read.
        is_head &= ~empty[:, None]
    for piece in tl.static_range(len(WIDTHS)):
        column = _offset(WIDTHS, piece) + tl.arange(0, _width(WIDTHS, piece))[None, :]
        tl.store(row + column, (acc[piece] * factor[:, None]).to(row.dtype.element_ty), mask=is_head & (column < DIM))


@triton.jit
def _no_pieces():
    return ()


@triton.constexpr_function
def _width(widths, piece):
    return widths[piece]


@triton.constexpr_function
def _offset(widths, piece):
    """First column of a piece."""
    return sum(widths[:piece])


@triton.constexpr_function
def _is_power_of_2(x):
    return x & (x - 1) == 0


@triton.constexpr_function
def _log2(x):
    return x.bit_length() - 1


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
def _tile_slots(
    window_slots_ptr, window_begin, window_end, entry_slots_ptr, entry_begin, entry_end, in_window, tile, BLOCK_N: tl.constexpr
):
    """The slots [BLOCK_N] of a tile, -1 where there is none."""
    slots_ptr = tl.where(in_window, window_slots_ptr, entry_slots_ptr)
    column = tl.where(in_window, window_begin, entry_begin) + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(slots_ptr + column, mask=column < tl.where(in_window, window_end, entry_end), other=-1)


@triton.jit
def _place(
    slot,
    in_window,
    window_cache_ptr,
    stride_window_page,
    WINDOW_PAGE: tl.constexpr,
    entry_cache_ptr,
    stride_entry_page,
    ENTRY_PAGE: tl.constexpr,
):
    """Where the pages of slots begin, the entries' indices in them, and the pages' size."""
    slot = tl.maximum(slot, 0)
    page_size = tl.where(in_window, WINDOW_PAGE, ENTRY_PAGE)
    if _is_power_of_2(WINDOW_PAGE) and _is_power_of_2(ENTRY_PAGE):
        page = slot >> tl.where(in_window, _log2(WINDOW_PAGE), _log2(ENTRY_PAGE))
        index = slot & (page_size - 1)
    else:
        page = slot // page_size
        index = slot % page_size
    stride = tl.where(in_window, stride_window_page, stride_entry_page)
    return tl.where(in_window, window_cache_ptr, entry_cache_ptr) + page.to(tl.int64) * stride, index, page_size


@triton.jit
def _prefetch(
    slot,
    in_window,
    window_cache_ptr,
    stride_window_page,
    WINDOW_PAGE: tl.constexpr,
    entry_cache_ptr,
    stride_entry_page,
    ENTRY_PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Ask L2 for packed entries."""
    page, index, page_size = _place(
        slot, in_window, window_cache_ptr, stride_window_page, WINDOW_PAGE, entry_cache_ptr, stride_entry_page, ENTRY_PAGE
    )
    data = (page + index * _DATA).to(tl.int64)[:, None] + tl.arange(0, _PREFETCHES)[None, :] * (_DATA // _PREFETCHES)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [data, tl.broadcast_to(slot[:, None], [BLOCK_N, _PREFETCHES]), tl.full([BLOCK_N, _PREFETCHES], _DATA // _PREFETCHES, tl.int32)],
        tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [(page + page_size * _DATA + index * _SCALES).to(tl.int64), slot],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _scores(q, kv, one_pass, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, NUM: tl.constexpr, WARP_GROUPS: tl.constexpr):
    """[BLOCK_H, BLOCK_N] of the pieces of queries and entries."""
    scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    if WARP_GROUPS:
        other = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        for piece in tl.static_range(0, NUM, 2):
            for _ in tl.range(one_pass, loop_unroll_factor=1):
                scores = tl.dot(q[piece], tl.trans(kv[piece]), scores)
                other = tl.dot(q[piece + 1], tl.trans(kv[piece + 1]), other)
        scores += other
    else:
        for piece in tl.static_range(NUM):
            scores = tl.dot(q[piece], tl.trans(kv[piece]), scores, input_precision="tf32x3")
    return scores


@triton.jit
def _accumulate(acc, weights, kv, NUM: tl.constexpr):
    added = _no_pieces()
    for piece in tl.static_range(NUM):
        added = added + (tl.dot(weights, kv[piece], acc[piece], input_precision="tf32x3"),)
    return added


@triton.jit
def _load_rows(row, present, DIM: tl.constexpr, WIDTHS: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """The pieces [BLOCK_N, width] of entries of a cache of plain rows; zeros where there is none."""
    kv = _no_pieces()
    for piece in tl.static_range(len(WIDTHS)):
        column = _offset(WIDTHS, piece) + tl.arange(0, _width(WIDTHS, piece))
        mask = present[:, None] & (column < DIM)[None, :]
        kv = kv + (tl.load(row[:, None] + column[None, :], mask=mask, other=0.0).to(DOT_DTYPE),)
    return kv


@triton.jit
def _load_packed(
    page,
    index,
    page_size,
    present,
    WIDTHS: tl.constexpr,
    HW_FP8: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The pieces [BLOCK_N, width] of entries of a packed cache, decoded; zeros where there is none."""
    present = present[:, None]
    data = (page + index * _DATA)[:, None]
    scale_ptr = (page + page_size * _DATA + index * _SCALES)[:, None]
    rope = (data + _NOPE).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    kv = _no_pieces()
    for piece in tl.static_range(len(WIDTHS)):
        column = _offset(WIDTHS, piece) + tl.arange(0, _width(WIDTHS, piece))[None, :]
        if _offset(WIDTHS, piece) < _NOPE:
            mask = present
            if _offset(WIDTHS, piece + 1) > _NOPE:
                mask = present & (column < _NOPE)
            code = tl.load(data + column, mask=mask, other=0)
            group = _offset(WIDTHS, piece) // _GROUP + tl.arange(0, _width(WIDTHS, piece) // _GROUP)[None, :]
            scale = decode_e8m0(tl.load(scale_ptr + group, mask=present, other=127)).to(DOT_DTYPE)
            value = _decode(code, HW_FP8, DOT_DTYPE).reshape(BLOCK_N, _width(WIDTHS, piece) // _GROUP, _GROUP)
            value = (value * scale[:, :, None]).reshape(BLOCK_N, _width(WIDTHS, piece))
        if _offset(WIDTHS, piece + 1) > _NOPE:
            rotated = _to_dot(tl.load(rope + (column - _NOPE), mask=present & (column >= _NOPE), other=0.0), DOT_DTYPE)
            value = tl.where(column < _NOPE, value, rotated) if _offset(WIDTHS, piece) < _NOPE else rotated
        kv = kv + (value,)
    return kv


@triton.jit
def _decode(code, HW_FP8: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """Like ``decode_e4m3``, but without hardware four codes at once, and NaN as 480: the scale of its group is not finite, either."""
    if HW_FP8 or DOT_DTYPE is not tl.float16:
        return decode_e4m3(code, HW_FP8).to(DOT_DTYPE)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, sign, factor;
        mov.b32 factor, 0x5c005c00;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        and.b32 sign, low, 0x80008000;
        shr.u32 low, low, 1;
        lop3.b32 low, low, 0x3f803f80, sign, 0xea;
        mul.f16x2 $0, low, factor;
        and.b32 sign, high, 0x80008000;
        shr.u32 high, high, 1;
        lop3.b32 high, high, 0x3f803f80, sign, 0xea;
        mul.f16x2 $1, high, factor;
        }""",
        "=r,=r,r",
        [code],
        tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _to_dot(x, DOT_DTYPE: tl.constexpr):
    """``x`` as an operand; two conversions to float16 in one instruction, which Triton does not find."""
    if DOT_DTYPE is tl.float16:
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x.to(tl.float32)], tl.float16, is_pure=True, pack=2)
    return x.to(DOT_DTYPE)


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
        present = part < num_splits
        exponent = tl.load(log_sum_ptr + part * NUM_HEADS, mask=present, other=_NOTHING)
        # Loads do not wait for each other; what an empty part left there does not count.
        partial = tl.load(
            partial_ptr + part[:, None] * (NUM_HEADS * DIM) + column[None, :], mask=present[:, None] & (column < DIM)[None, :], other=0.0
        )
        partial = tl.where((exponent != _NOTHING)[:, None], partial.to(tl.float32), 0.0)
        acc += tl.sum(partial * tl.exp2(exponent - peak)[:, None], 0)
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * DIM + column, out, mask=column < DIM)
