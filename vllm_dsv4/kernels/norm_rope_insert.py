"""Triton kernel of ``norm_rope_insert``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._entries import entry_options, store_entry
from vllm_dsv4.kernels._launch import has_fp8, launch
from vllm_dsv4.kernels._rope import load_cos_sin, rotate

_HEADS = 8
"""Heads of one token that a program norms."""


def norm_rope_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_norm_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """See ``reference/norm_rope_insert.py``; sums are float32. ``q`` and ``kv`` may be column slices."""
    num_tokens, num_heads, head_dim = q.shape
    if q.stride(2) != 1 or kv.stride(1) != 1:
        raise ValueError(f"norm_rope_insert: q and kv must be contiguous within a head, got strides {q.stride()} and {kv.stride()}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    options = entry_options(cache)
    if options["DIM"] != head_dim:
        raise ValueError(f"norm_rope_insert: cache must hold entries of {head_dim} values, got {options['DIM']}")
    launch(
        _norm_rope_insert_kernel,
        (num_tokens * (1 + triton.cdiv(num_heads, _HEADS)),),
        q,
        kv,
        kv_norm_weight,
        positions,
        cos_sin_cache,
        cache,
        slot_mapping,
        out,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        cache.stride(0),
        NUM_HEADS=num_heads,
        ROPE_DIM=cos_sin_cache.shape[1],
        EPS=eps,
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(head_dim),
        HW_FP8=has_fp8(q.device),
        num_warps=4,
        **options,
    )
    return out


@triton.jit
def _norm_rope_insert_kernel(
    q_ptr,
    kv_ptr,
    kv_norm_weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    cache_ptr,
    slot_mapping_ptr,
    out_ptr,
    stride_q_t,
    stride_q_h,
    stride_kv,
    stride_page,
    NUM_HEADS: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HW_FP8: tl.constexpr,
    FORMAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One program: ``HEADS`` queries of one token; the first of each token: its KV vector."""
    PROGRAMS: tl.constexpr = 1 + (NUM_HEADS + HEADS - 1) // HEADS
    token = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    group = tl.program_id(0) % PROGRAMS
    position = tl.load(positions_ptr + token)
    pair = tl.arange(0, BLOCK // 2)
    cos, sin = load_cos_sin(cos_sin_ptr, position, pair, (DIM - ROPE_DIM) // 2, ROPE_DIM // 2)
    column = tl.arange(0, BLOCK)
    if group == 0:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:
            mask = column < DIM
            kv = tl.load(kv_ptr + token * stride_kv + column, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(kv_norm_weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            normed = (kv * tl.rsqrt(tl.sum(kv * kv) / DIM + EPS) * weight).to(DTYPE).to(tl.float32)
            even, odd = tl.split(normed.reshape(BLOCK // 2, 2))
            even, odd = rotate(even, odd, cos, sin)
            even, odd = even.to(DTYPE).to(tl.float32), odd.to(DTYPE).to(tl.float32)
            store_entry(cache_ptr, stride_page, slot, even, odd, FORMAT, PAGE_SIZE, DIM, HW_FP8)
    else:
        head = (group - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (head < NUM_HEADS) & (column < DIM)[None, :]
        q = tl.load(q_ptr + token * stride_q_t + head * stride_q_h + column[None, :], mask=mask, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, axis=1) / DIM + EPS)[:, None]
        even, odd = tl.split(q.reshape(HEADS, BLOCK // 2, 2))
        even, odd = rotate(even, odd, cos[None, :], sin[None, :])
        out = tl.interleave(even, odd).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (token * NUM_HEADS + head) * DIM + column[None, :], out, mask=mask)
