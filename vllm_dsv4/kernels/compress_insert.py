"""Triton kernel of ``compress_insert``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._entries import INDEXER_MXFP4_BYTES, entry_options, hadamard, store_entry
from vllm_dsv4.kernels._launch import has_fp8, launch
from vllm_dsv4.kernels._rope import load_cos_sin, rotate

_BATCH = 1024
"""Up to so many tokens each gets its own program."""


def compress_insert(
    state_cache: torch.Tensor,
    state_block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    positions: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
    cache: torch.Tensor,
    entry_slots: torch.Tensor,
    compress_ratio: int,
    official_rounding: bool = True,
) -> None:
    """See ``reference/compress_insert.py``; sums are float32."""
    num_tokens = entry_slots.shape[0]
    options = entry_options(cache)
    window = 2 * compress_ratio if compress_ratio == 4 else compress_ratio
    # A batch of single tokens may complete a window with each, a prompt with few.
    tokens = min(compress_ratio, 16) if num_tokens > _BATCH else 1
    launch(
        _compress_insert_kernel,
        (triton.cdiv(num_tokens, tokens),),
        state_cache,
        state_block_table,
        token_to_req,
        positions,
        norm_weight,
        cos_sin_cache,
        cache,
        entry_slots,
        num_tokens,
        state_cache.stride(0),
        state_block_table.stride(0),
        cache.stride(0),
        RATIO=compress_ratio,
        WINDOW=window,
        ROWS=min(8, triton.next_power_of_2(window)),
        STAGES=1,
        TOKENS=tokens,
        STATE_PAGE_SIZE=state_cache.shape[1],
        ROPE_DIM=cos_sin_cache.shape[1],
        EPS=eps,
        OFFICIAL=official_rounding,
        BLOCK=triton.next_power_of_2(cache.shape[2] if options["FORMAT"] == 0 else int(str(options["DIM"]))),
        HW_FP8=has_fp8(cache.device),
        num_warps=4,
        **options,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _compress_insert_kernel(
    state_ptr,
    block_table_ptr,
    token_to_req_ptr,
    positions_ptr,
    norm_weight_ptr,
    cos_sin_ptr,
    cache_ptr,
    entry_slots_ptr,
    num_tokens,
    stride_state_page,
    stride_block_table,
    stride_page,
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    TOKENS: tl.constexpr,
    STATE_PAGE_SIZE: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    EPS: tl.constexpr,
    OFFICIAL: tl.constexpr,
    BLOCK: tl.constexpr,
    HW_FP8: tl.constexpr,
    FORMAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One program: ``TOKENS`` tokens one by one, and nothing where they complete no window."""
    first_token = tl.program_id(0).to(tl.int64) * TOKENS
    for token in range(first_token, tl.minimum(first_token + TOKENS, num_tokens)):
        slot = tl.load(entry_slots_ptr + token)
        position = tl.load(positions_ptr + token)
        request = tl.load(token_to_req_ptr + token).to(tl.int64)
        if slot >= 0:
            between: tl.constexpr = DTYPE if OFFICIAL else tl.float32
            column = tl.arange(0, BLOCK)
            weight = tl.load(norm_weight_ptr + column, mask=column < DIM, other=0.0).to(tl.float32)
            start = position // RATIO * RATIO
            cos, sin = load_cos_sin(cos_sin_ptr, start, tl.arange(0, BLOCK // 2), (DIM - ROPE_DIM) // 2, ROPE_DIM // 2)
            table = block_table_ptr + request * stride_block_table
            pooled = _pool_window(state_ptr, table, position, stride_state_page, RATIO, WINDOW, ROWS, STAGES, STATE_PAGE_SIZE, DIM, BLOCK)
            pooled = pooled.to(between).to(tl.float32)
            normed = (pooled * tl.rsqrt(tl.sum(pooled * pooled) / DIM + EPS) * weight).to(between).to(tl.float32)
            even, odd = tl.split(normed.reshape(BLOCK // 2, 2))
            even, odd = rotate(even, odd, cos, sin)
            even, odd = even.to(DTYPE).to(tl.float32), odd.to(DTYPE).to(tl.float32)
            if FORMAT == INDEXER_MXFP4_BYTES:
                x = hadamard(tl.interleave(even, odd)).to(DTYPE).to(tl.float32)
                even, odd = tl.split(x.reshape(BLOCK // 2, 2))
            store_entry(cache_ptr, stride_page, slot, even, odd, FORMAT, PAGE_SIZE, DIM, HW_FP8)


@triton.jit
def _pool_window(
    state_ptr,
    block_table_ptr,
    last_position,
    stride_page,
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    STATE_PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Softmax-weighted sum over the window that ends at ``last_position``, per channel → float32 [BLOCK]."""
    OVERLAPPING: tl.constexpr = WINDOW != RATIO
    WIDTH: tl.constexpr = 2 * DIM if OVERLAPPING else DIM
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    # Every element keeps a softmax of its own over every ROWS-th row; they are joined at the end. The largest gate begins
    # finite, so that masked ones (-inf) weigh 0.
    largest = tl.full((ROWS, BLOCK), -3.0e38, tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    weighted = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, WINDOW, ROWS, num_stages=STAGES):
        position = last_position - (WINDOW - 1) + start + row
        present = (position >= 0) & (start + row < WINDOW)
        block = tl.load(block_table_ptr + position // STATE_PAGE_SIZE, mask=present, other=0).to(tl.int64)
        offset = block * stride_page + (position % STATE_PAGE_SIZE) * (2 * WIDTH)
        if OVERLAPPING:  # the previous window's tokens give their first halves, the own window's tokens their second
            offset += tl.where(start + row < RATIO, 0, DIM)
        pointer = state_ptr + offset[:, None] + column
        mask = present[:, None] & (column < DIM)
        kv = tl.load(pointer, mask=mask, other=0.0)
        gate = tl.load(pointer + WIDTH, mask=mask, other=float("-inf"))
        # Either what was summed so far is rescaled, or the row's weight is not 1: one exponential serves both.
        larger = gate > largest
        factor = tl.exp(-tl.abs(gate - largest))
        rescale = tl.where(larger, factor, 1.0)
        weight = tl.where(larger, 1.0, factor)
        total = total * rescale + weight
        weighted = weighted * rescale + weight * kv
        largest = tl.maximum(largest, gate)
    share = tl.exp(largest - tl.max(largest, axis=0)[None, :])
    total = tl.sum(total * share, axis=0)
    # Only padding beyond DIM has no row at all.
    return tl.sum(weighted * share, axis=0) / tl.where(total > 0, total, 1.0)
