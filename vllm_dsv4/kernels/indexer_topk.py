"""Triton kernels of ``indexer_topk``: scores of all visible entries, then a radix select for each token.

Scores are kept as 32-bit keys that grow as scores fall. Both kernels leave tokens alone whose entries all fit, and the cost of
the others follows their own number of entries, whatever the block table has room for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._fp8 import decode_e2m1, decode_e4m3, decode_e8m0
from vllm_dsv4.kernels._launch import has_fp8, launch, num_sms
from vllm_dsv4.quantization.formats import INDEXER_FP8, INDEXER_MXFP4, IndexerFP8Format, IndexerMXFP4Format, RowFormat, cache_format
from vllm_dsv4.reference.indexer_query import IndexerQuery
from vllm_dsv4.reference.indexer_topk import SCORE_BYTES

_ROWS = tl.constexpr(0)
_FP8 = tl.constexpr(INDEXER_FP8.entry_bytes)
_MXFP4 = tl.constexpr(INDEXER_MXFP4.entry_bytes)
_BLOCK_SCALES = tl.constexpr(INDEXER_MXFP4.scale_bytes)

_TILE = 64
"""Entries that a program scores at once."""
_PREFILL_TOKENS = 128
"""From as many tokens on, several of a request share its keys."""
_BLOCK = 2048
"""Keys that the selection holds in registers."""
_GROUP = 16
"""Entries of which the best key is noted, so that the selection can pass over the others."""


def indexer_topk(
    query: IndexerQuery,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    num_entries: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    """See ``reference/indexer_topk.py``; scores are sums in float32."""
    device = query.q.device
    num_tokens, num_heads = query.weights.shape
    fmt = cache_format(k_cache.dtype, k_cache.shape[-1])
    if not isinstance(fmt, IndexerFP8Format | IndexerMXFP4Format | RowFormat):
        raise ValueError(f"indexer_topk: a cache of {fmt} does not hold indexer keys")
    indices = torch.empty(num_tokens, topk, dtype=torch.int32, device=device)
    capacity = triton.cdiv(max(1, block_table.shape[1] * k_cache.shape[1]), _TILE) * _TILE
    chunk = max(1, min(num_tokens, SCORE_BYTES // (4 * capacity)))
    keys = torch.empty(chunk, capacity, dtype=torch.int32, device=device)
    tokens = 1 if num_tokens < _PREFILL_TOKENS else 16
    for first_token in range(0, num_tokens, chunk):
        last_token = min(first_token + chunk, num_tokens)
        num_groups = triton.cdiv(last_token - first_token, tokens)
        splits = max(1, min(capacity // _TILE, triton.cdiv(4 * num_sms(device), num_groups)))
        launch(
            _score_kernel,
            (splits, num_groups),
            query.q.view(torch.uint8) if isinstance(fmt, IndexerFP8Format) else query.q,
            query.q_sf,
            query.weights,
            k_cache,
            block_table,
            token_to_req,
            num_entries,
            keys,
            k_cache.stride(0),
            block_table.stride(0),
            capacity,
            first_token,
            last_token,
            topk,
            FORMAT=0 if isinstance(fmt, RowFormat) else fmt.entry_bytes,
            PAGE_SIZE=k_cache.shape[1],
            NUM_HEADS=num_heads,
            DIM=fmt.head_dim,
            TOKENS=tokens,
            TILE=_TILE,
            BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
            BLOCK_D=max(16, triton.next_power_of_2(fmt.head_dim)),
            DOT_DTYPE=_dot_dtype(fmt.value_dtype, device, isinstance(fmt, IndexerFP8Format)),
            HW_FP8=has_fp8(device),
            num_warps=4,
        )
        launch(
            _select_kernel,
            (last_token - first_token,),
            keys,
            num_entries,
            indices,
            capacity,
            first_token,
            TOPK=topk,
            BLOCK_TOPK=triton.next_power_of_2(topk),
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return indices


def _dot_dtype(value_dtype: torch.dtype, device: torch.device, fp8: bool) -> tl.dtype:
    """An exact dtype for products of stored values; e4m3 is decoded to float16, the others are bfloat16 if not plain rows."""
    if device.type == "cpu" or value_dtype == torch.float32:
        return tl.float32
    return tl.float16 if fp8 or value_dtype == torch.float16 else tl.bfloat16


@triton.jit(do_not_specialize=["stride_table", "capacity", "first_token", "last_token", "topk"])
def _score_kernel(
    q_ptr,
    q_sf_ptr,
    weights_ptr,
    cache_ptr,
    table_ptr,
    token_to_req_ptr,
    num_entries_ptr,
    keys_ptr,
    stride_page,
    stride_table,
    capacity,
    first_token,
    last_token,
    topk,
    FORMAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
):
    """One program: ``TOKENS`` tokens, every so many tiles of entries."""
    group = first_token + tl.program_id(1) * TOKENS
    if TOKENS == 1:
        count = tl.load(num_entries_ptr + group)
        if count > topk:
            table_ptr += tl.load(token_to_req_ptr + group).to(tl.int64) * stride_table
            q, q_odd = _load_queries(q_ptr, q_sf_ptr, group, FORMAT, NUM_HEADS, DIM, BLOCK_H, BLOCK_D, DOT_DTYPE, HW_FP8)
            weights = _load_weights(weights_ptr, group, NUM_HEADS, BLOCK_H)
            keys_ptr += tl.program_id(1).to(tl.int64) * capacity
            for start in range(tl.program_id(0) * TILE, count, tl.num_programs(0) * TILE):
                k, k_odd, scale = _load_keys(
                    cache_ptr, table_ptr, stride_page, start, count, FORMAT, PAGE_SIZE, DIM, TILE, BLOCK_D, DOT_DTYPE, HW_FP8
                )
                _score(keys_ptr, start, count, k, k_odd, scale, q, q_odd, weights, FORMAT)
    else:
        tokens = group + tl.arange(0, TOKENS)
        counts = tl.load(num_entries_ptr + tokens, mask=tokens < last_token, other=0)
        counts = tl.where(counts > topk, counts, 0)
        requests = tl.load(token_to_req_ptr + tokens, mask=tokens < last_token, other=-1)
        for start in range(tl.program_id(0) * TILE, tl.max(counts), tl.num_programs(0) * TILE):
            begin = group
            end = tl.minimum(group + TOKENS, last_token)
            while begin < end:
                request = tl.load(token_to_req_ptr + begin)
                # Tokens begin .. next - 1 are of one request; the others' entries do not matter.
                following = tl.min(tl.where((tokens >= begin) & (requests != request), tokens, end))
                following = tl.minimum(following, end)
                visible = tl.max(tl.where((tokens >= begin) & (tokens < following), counts, 0))
                if visible > start:
                    table = table_ptr + request.to(tl.int64) * stride_table
                    k, k_odd, scale = _load_keys(
                        cache_ptr, table, stride_page, start, visible, FORMAT, PAGE_SIZE, DIM, TILE, BLOCK_D, DOT_DTYPE, HW_FP8
                    )
                    for token in range(begin, following):
                        q, q_odd = _load_queries(q_ptr, q_sf_ptr, token, FORMAT, NUM_HEADS, DIM, BLOCK_H, BLOCK_D, DOT_DTYPE, HW_FP8)
                        weights = _load_weights(weights_ptr, token, NUM_HEADS, BLOCK_H)
                        count = tl.load(num_entries_ptr + token)
                        row = keys_ptr + (token - first_token).to(tl.int64) * capacity
                        _score(row, start, count, k, k_odd, scale, q, q_odd, weights, FORMAT)
                begin = following


@triton.jit
def _score(keys_ptr, start, count, k, k_odd, scale, q, q_odd, weights, FORMAT: tl.constexpr):
    """Scores of a tile of entries for one token, stored as keys."""
    products = tl.dot(k, tl.trans(q), input_precision="tf32x3")
    if FORMAT == _MXFP4:
        products = tl.dot(k_odd, tl.trans(q_odd), products, input_precision="tf32x3")
    products = tl.where(products < 0.0, 0.0, products)  # keeps NaN
    score = tl.sum(products * weights[None, :], axis=1) * scale
    bits = tl.where(score != score, float("-inf"), tl.where(score == 0.0, 0.0, score)).to(tl.int32, bitcast=True)
    # As unsigned integers in falling order of scores.
    key = tl.where(bits < 0, bits, 0x7FFFFFFF - bits)
    entry = start + tl.arange(0, key.shape[0])
    tl.store(keys_ptr + entry, key, mask=entry < count)


@triton.jit
def _load_weights(weights_ptr, token, NUM_HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    head = tl.arange(0, BLOCK_H)
    return tl.load(weights_ptr + token.to(tl.int64) * NUM_HEADS + head, mask=head < NUM_HEADS, other=0.0)


@triton.jit
def _load_queries(
    q_ptr,
    q_sf_ptr,
    token,
    FORMAT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
):
    """Queries of a token [BLOCK_H, BLOCK_D], twice; of MXFP4 their even and their odd columns."""
    head = tl.arange(0, BLOCK_H)
    row = token.to(tl.int64) * NUM_HEADS + head
    is_head = head < NUM_HEADS
    if FORMAT == _MXFP4:
        return _load_mxfp4(q_ptr + row * (DIM // 2), q_sf_ptr + row * _BLOCK_SCALES, is_head, DIM, DOT_DTYPE)
    else:
        column = tl.arange(0, BLOCK_D)
        q = tl.load(q_ptr + row[:, None] * DIM + column[None, :], mask=is_head[:, None] & (column < DIM)[None, :], other=0)
        if FORMAT == _FP8:
            q = decode_e4m3(q, HW_FP8)
        q = q.to(DOT_DTYPE)
        return q, q


@triton.jit
def _load_keys(
    cache_ptr,
    table_ptr,
    stride_page,
    start,
    count,
    FORMAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
):
    """Entries ``start`` .. of a request [TILE, BLOCK_D], as ``_load_queries``, and their scales [TILE]; zeros from ``count`` on."""
    entry = start + tl.arange(0, TILE)
    present = entry < count
    page = tl.load(table_ptr + entry // PAGE_SIZE, mask=present, other=0).to(tl.int64)
    page = cache_ptr + page * stride_page
    index = entry % PAGE_SIZE
    if FORMAT == _MXFP4:
        sf_ptr = page + (PAGE_SIZE * (DIM // 2) + index * _BLOCK_SCALES)
        even, odd = _load_mxfp4(page + index * (DIM // 2), sf_ptr, present, DIM, DOT_DTYPE)
        return even, odd, tl.full([TILE], 1.0, tl.float32)
    else:
        column = tl.arange(0, BLOCK_D)
        pointer = (page + index * DIM)[:, None] + column[None, :]
        k = tl.load(pointer, mask=present[:, None] & (column < DIM)[None, :], other=0)
        if FORMAT == _FP8:
            k = decode_e4m3(k, HW_FP8).to(DOT_DTYPE)
            scale_ptr = (page + (PAGE_SIZE * DIM + index * 4)).to(tl.pointer_type(tl.float32), bitcast=True)
            return k, k, tl.load(scale_ptr, mask=present, other=1.0)
        else:
            k = k.to(DOT_DTYPE)
            return k, k, tl.full([TILE], 1.0, tl.float32)


@triton.jit
def _load_mxfp4(data_ptr, sf_ptr, present, DIM: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """Vectors at ``data_ptr`` [N] with scales at ``sf_ptr`` [N] → even and odd columns [N, DIM / 2]; zeros where not present."""
    ROWS: tl.constexpr = data_ptr.shape[0]
    byte = tl.arange(0, DIM // 2)
    packed = tl.load(data_ptr[:, None] + byte[None, :], mask=present[:, None], other=0)
    block = tl.arange(0, DIM // 32)
    scale = decode_e8m0(tl.load(sf_ptr[:, None] + block[None, :], mask=present[:, None], other=127))
    scale = tl.broadcast_to(scale[:, :, None], (ROWS, DIM // 32, 16)).reshape(ROWS, DIM // 2)
    even = decode_e2m1(packed & 15).to(tl.float32) * scale
    odd = decode_e2m1(packed >> 4).to(tl.float32) * scale
    return even.to(DOT_DTYPE), odd.to(DOT_DTYPE)


@triton.jit(do_not_specialize=["capacity", "first_token"])
def _select_kernel(
    keys_ptr,
    num_entries_ptr,
    indices_ptr,
    capacity,
    first_token,
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one token."""
    token = first_token + tl.program_id(0)
    count = tl.load(num_entries_ptr + token)
    indices_ptr += token.to(tl.int64) * TOPK
    if count <= TOPK:
        column = tl.arange(0, BLOCK_TOPK)
        tl.store(indices_ptr + column, tl.where(column < count, column, -1), mask=column < TOPK)
    else:
        keys_ptr += tl.program_id(0).to(tl.int64) * capacity
        threshold, wanted = _threshold(keys_ptr, count, TOPK, BLOCK)
        _store_best(indices_ptr, keys_ptr, count, threshold, wanted, BLOCK)


@triton.jit
def _load_block(keys_ptr, start, count, BLOCK: tl.constexpr):
    index = start + tl.arange(0, BLOCK)
    present = index < count
    return tl.load(keys_ptr + index, mask=present, other=-1).to(tl.uint32, bitcast=True), present


@triton.jit
def _threshold(keys_ptr, count, wanted, BLOCK: tl.constexpr):
    """The key at rank ``wanted`` (1 = the smallest) of ``count``, and how many of its equals are within that rank."""
    first, first_present = _load_block(keys_ptr, 0, count, BLOCK)
    threshold = tl.full([], 0, tl.uint32)
    for digit in tl.static_range(4):
        histogram = _digits(first, first_present, threshold, digit)
        for start in range(BLOCK, count, BLOCK):
            keys, present = _load_block(keys_ptr, start, count, BLOCK)
            histogram += _digits(keys, present, threshold, digit)
        up_to = tl.cumsum(histogram, 0)
        below = up_to < wanted
        threshold |= tl.sum(below.to(tl.int32)).to(tl.uint32) << (24 - 8 * digit)
        wanted -= tl.max(tl.where(below, up_to, 0))
    return threshold, wanted


@triton.jit
def _digits(keys, present, prefix, DIGIT: tl.constexpr):
    """How often each value of the keys' ``DIGIT``-th byte occurs among those that agree with ``prefix`` before it → int32 [256]."""
    if DIGIT > 0:
        present = present & ((keys ^ prefix) >> (32 - 8 * DIGIT) == 0)
    return tl.histogram(((keys >> (24 - 8 * DIGIT)) & 0xFF).to(tl.int32), 256, mask=present)


@triton.jit
def _store_best(indices_ptr, keys_ptr, count, threshold, wanted, BLOCK: tl.constexpr):
    """Store, in ascending order, the indices of the keys below ``threshold`` and of the first ``wanted`` that equal it."""
    num_below = tl.full([], 0, tl.int32)
    num_equal = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK):
        keys, present = _load_block(keys_ptr, start, count, BLOCK)
        below = (keys < threshold) & present
        equal = (keys == threshold) & present
        # Two counts in one sum: BLOCK is less than 2^15.
        both = (below.to(tl.int32) << 16) + equal.to(tl.int32)
        before = tl.cumsum(both, 0) - both
        equal_before = num_equal + (before & 0xFFFF)
        place = num_below + (before >> 16) + tl.minimum(equal_before, wanted)
        index = start + tl.arange(0, BLOCK)
        tl.store(indices_ptr + place, index, mask=below | (equal & (equal_before < wanted)))
        total = tl.sum(both)
        num_below += total >> 16
        num_equal += total & 0xFFFF
