"""Triton kernel of ``compressor_store``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._launch import launch


def compressor_store(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See ``reference/compressor_store.py``. ``kv`` and ``gate`` may be column slices."""
    num_tokens, width = kv.shape
    if kv.stride(1) != 1 or gate.stride(1) != 1:
        raise ValueError(f"compressor_store: kv and gate must be contiguous within a row, got strides {kv.stride()} and {gate.stride()}")
    launch(
        _store_kernel,
        (num_tokens,),
        kv,
        gate,
        ape,
        positions,
        state_cache,
        slot_mapping,
        kv.stride(0),
        gate.stride(0),
        state_cache.stride(0),
        RATIO=ape.shape[0],
        PAGE_SIZE=state_cache.shape[1],
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )


@triton.jit
def _store_kernel(
    kv_ptr,
    gate_ptr,
    ape_ptr,
    positions_ptr,
    state_ptr,
    slot_mapping_ptr,
    stride_kv,
    stride_gate,
    stride_page,
    RATIO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    position = tl.load(positions_ptr + token)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    kv = tl.load(kv_ptr + token * stride_kv + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * stride_gate + column, mask=mask, other=0.0).to(tl.float32)
    gate += tl.load(ape_ptr + (position % RATIO) * WIDTH + column, mask=mask, other=0.0)
    if slot >= 0:
        row = state_ptr + (slot // PAGE_SIZE) * stride_page + (slot % PAGE_SIZE) * (2 * WIDTH)
        tl.store(row + column, kv, mask=mask)
        tl.store(row + WIDTH + column, gate, mask=mask)
