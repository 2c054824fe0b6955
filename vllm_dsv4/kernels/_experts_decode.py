"""Triton kernels of ``experts`` with MXFP4 weights for few tokens, where reading the weights of the hit experts is all that counts.

As in ``_experts_prefill.py``, a *pair* is ``token * topk + choice``, pairs are sorted by expert, and products are transposed: a
tile has rows of the weight and up to BLOCK_M pairs of one expert. Tiles are smaller here, so that the few hit experts occupy all
multiprocessors; whoever finishes a group of 128 columns of the weighted activation last quantises it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._experts_prefill import _local_ids, _round_trip, _stored_column
from vllm_dsv4.kernels._fp8 import decode_e2m1, fp8_scale_exponent, largest_magnitude, pow2
from vllm_dsv4.kernels._launch import capability, dot_dtype, has_fp8, launch
from vllm_dsv4.kernels._mxfp4 import UNDO_SHIFT

_MAX_PAIRS = 1024
"""Pairs that one program sorts at once."""
_FEW_TOKENS = 8
"""Of so few the programs of the second product add up the experts' outputs; of more, another launch."""

# A 32-bit register of eight weights and their scale -> pairs of bfloat16: weights (0, 4), (1, 5), (2, 6), (3, 7). A weight's sign
# moves to bit 15 and its other three bits to bits 8..6: exponent and mantissa of a bfloat16 that is 2^-126 times as large,
# subnormal for 0.5. The product with the scale makes up for that: a fused multiply-add to -0, since this instruction is on every
# GPU with bfloat16.
_UNPACK = tl.constexpr("""
{
    .reg .b32 s, t, zero;
    mov.b32 zero, 0x80008000;
    shl.b32 s, $4, 12;
    shl.b32 t, $4, 6;
    and.b32 t, t, 0x01C001C0;
    lop3.b32 t, s, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $0, t, $5, zero;
    shl.b32 s, $4, 8;
    shl.b32 t, $4, 2;
    and.b32 t, t, 0x01C001C0;
    lop3.b32 t, s, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $1, t, $5, zero;
    shl.b32 s, $4, 4;
    shr.b32 t, $4, 2;
    and.b32 t, t, 0x01C001C0;
    lop3.b32 t, s, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $2, t, $5, zero;
    shr.b32 t, $4, 6;
    and.b32 t, t, 0x01C001C0;
    lop3.b32 t, $4, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $3, t, $5, zero;
}
""")


@dataclass(frozen=True)
class _Config:
    """Tile of a product: rows of the weight, pairs, groups of 128 columns in a step of the sum (fewer if K is not a multiple)."""

    rows: int
    block_m: int
    groups: int
    num_warps: int
    num_stages: int


def takes_decode(x: torch.Tensor, topk_ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whether ``experts_decode`` is for this input: few tokens, MXFP4 weights, widths of whole groups."""
    num_tokens, topk = topk_ids.shape
    whole = x.shape[1] % 128 == 0 and w13.shape[1] % 256 == 0
    # _UNPACK takes four neighbouring bytes as a register, and Triton's loads give them to a thread only where 16 bytes are aligned.
    aligned = w13.data_ptr() % 16 == 0 and w2.data_ptr() % 16 == 0
    return aligned and w13.dtype == w2.dtype == torch.uint8 and whole and num_tokens <= 128 and num_tokens * topk <= _MAX_PAIRS


def experts_decode(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_sf: torch.Tensor,
    w2_sf: torch.Tensor,
    swiglu_limit: float,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """See ``reference/experts.py``; sums are float32, so the result is [T, D] float32."""
    num_tokens, hidden_size = x.shape
    num_experts, intermediate = w13.shape[0], w13.shape[1] // 2
    topk = topk_ids.shape[1]
    num_pairs = num_tokens * topk
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    has_map = expert_map is not None
    local_map = topk_ids if expert_map is None else expert_map
    gate_up, down = _configs(num_tokens)
    inputs = torch.empty(num_tokens, hidden_size, dtype=torch.bfloat16, device=x.device)
    pairs, tiles = (torch.empty(num_pairs, dtype=torch.int32, device=x.device) for _ in range(2))
    num_groups, num_blocks = intermediate // 128, hidden_size // down.rows
    arrivals = torch.empty(num_blocks + num_pairs * num_groups, dtype=torch.int32, device=x.device)
    launch(
        _prepare_kernel,
        (num_experts + 1 + num_tokens * triton.cdiv(hidden_size, 1024) if num_tokens else 0,),
        x,
        x.stride(0),
        topk_ids,
        local_map,
        inputs,
        pairs,
        tiles,
        arrivals,
        num_pairs,
        len(arrivals),
        WIDTH=hidden_size,
        NUM_EXPERTS=num_experts,
        HAS_MAP=has_map,
        BLOCK_M=gate_up.block_m,
        MAX_PAIRS=64 if num_tokens <= _FEW_TOKENS and num_pairs <= 64 else _MAX_PAIRS,
        HW_FP8=has_fp8(x.device),
        num_warps=4,
    )
    weighted = torch.empty(num_pairs, intermediate, dtype=x.dtype, device=x.device)
    hidden = torch.empty(num_pairs, intermediate, dtype=torch.bfloat16, device=x.device)
    launch(
        _gate_up_kernel,
        (2 * intermediate // gate_up.rows, num_pairs),
        inputs,
        *_stored(w13, w13_sf, gate_up),
        pairs,
        tiles,
        topk_weights,
        weighted,
        arrivals[num_blocks:],
        hidden,
        K=hidden_size,
        N=intermediate,
        LIMIT=float(swiglu_limit),
        TOPK=topk,
        HW_FP8=has_fp8(x.device),
        **_options(x.device, gate_up, hidden_size),
    )
    y = torch.empty(num_pairs, hidden_size, dtype=x.dtype, device=x.device)
    out = torch.empty(num_tokens, hidden_size, dtype=torch.float32, device=x.device)
    sums = num_tokens <= _FEW_TOKENS
    launch(
        _down_kernel,
        (num_blocks, num_pairs),
        hidden,
        *_stored(w2, w2_sf, down),
        pairs,
        tiles,
        y,
        arrivals,
        topk_ids,
        local_map,
        out,
        num_tokens,
        K=intermediate,
        N=hidden_size,
        TOPK=topk,
        HAS_MAP=has_map,
        SUMS=sums,
        **_options(x.device, down, intermediate),
    )
    if not sums:
        launch(
            _sum_kernel,
            (num_tokens, triton.cdiv(hidden_size, 512)),
            y,
            topk_ids,
            local_map,
            out,
            N=hidden_size,
            TOPK=topk,
            HAS_MAP=has_map,
            BLOCK=512,
            **_overlap(x.device),
            num_warps=4,
        )
    return out


def _configs(num_tokens: int) -> tuple[_Config, _Config]:
    """Tiles of the two products.

    Of two warps: Triton gives those the oldest tensor cores' instructions everywhere, for which operands are laid out here. Later
    ones begin at four warps; which it takes for tiles as narrow as 8 differs between its versions.
    """
    if num_tokens <= _FEW_TOKENS:
        return _Config(32, 8, 2, 2, 4), _Config(32, 8, 2, 2, 4)
    return _Config(64, 8, 2, 2, 4), _Config(64, 8, 2, 2, 4)


def _options(device: torch.device, config: _Config, width: int) -> dict[str, object]:
    return {
        "DTYPE": dot_dtype(device),
        "ROWS": config.rows,
        "BLOCK_M": config.block_m,
        "GROUPS": math.gcd(config.groups, width // 128),
        "NUM_WARPS": config.num_warps,
        "STAGES": config.num_stages,
        **_overlap(device),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _overlap(device: torch.device) -> dict[str, bool]:
    """Options of a launch that may begin before the one that it follows has ended, on GPUs that can."""
    return {"OVERLAPS": True, "launch_pdl": True} if capability(device) >= (9, 0) else {"OVERLAPS": False}


def _stored(weight: torch.Tensor, sf: torch.Tensor, config: _Config) -> tuple[torch.Tensor, int, torch.Tensor, int]:
    """A stack of weights as a kernel takes it: bytes, scales of one or two groups at once, and the strides between experts."""
    sf = sf.view(torch.int64 if math.gcd(config.groups, sf.shape[-1] // 4) % 2 == 0 else torch.int32)
    return weight, weight.stride(0), sf, sf.stride(0)


@triton.jit(do_not_specialize=["num_pairs", "num_arrivals"])
def _prepare_kernel(
    x_ptr,
    stride_x,
    topk_ids_ptr,
    expert_map_ptr,
    inputs_ptr,
    pairs_ptr,
    tiles_ptr,
    arrivals_ptr,
    num_pairs,
    num_arrivals,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MAX_PAIRS: tl.constexpr,
    HW_FP8: tl.constexpr,
):
    """One program: the pairs of one expert, the pairs without one, or 8 groups of 128 columns of one token."""
    program = tl.program_id(0)
    if program <= NUM_EXPERTS:
        _list_pairs(program, topk_ids_ptr, expert_map_ptr, pairs_ptr, tiles_ptr, num_pairs, NUM_EXPERTS, HAS_MAP, BLOCK_M, MAX_PAIRS)
        for begin in range(program * 128, num_arrivals, (NUM_EXPERTS + 1) * 128):
            index = begin + tl.arange(0, 128)
            tl.store(arrivals_ptr + index, tl.zeros((128,), tl.int32), mask=index < num_arrivals)
    else:
        CHUNKS: tl.constexpr = (WIDTH + 1023) // 1024
        token = ((program - NUM_EXPERTS - 1) // CHUNKS).to(tl.int64)
        group = ((program - NUM_EXPERTS - 1) % CHUNKS * 8 + tl.arange(0, 8))[:, None]
        _quantize_groups(x_ptr + token * stride_x, inputs_ptr + token * WIDTH, group, group < WIDTH // 128, HW_FP8)


@triton.jit
def _list_pairs(
    expert,
    topk_ids_ptr,
    expert_map_ptr,
    pairs_ptr,
    tiles_ptr,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MAX_PAIRS: tl.constexpr,
):
    """Pairs of ``expert`` (NUM_EXPERTS: of none) at their places in the order of experts. ``tiles`` holds at the first place of
    a tile its expert * 256 + its number of pairs, elsewhere 0 pairs."""
    pair = tl.arange(0, MAX_PAIRS)
    ids = _local_ids(topk_ids_ptr, expert_map_ptr, pair, pair < num_pairs, HAS_MAP)
    ids = tl.where(ids < 0, NUM_EXPERTS, ids)
    hit = (ids == expert) & (pair < num_pairs)
    rank = tl.cumsum(hit.to(tl.int32)) - 1
    place = tl.sum((ids < expert).to(tl.int32)) + rank
    tl.store(pairs_ptr + place, pair, mask=hit)
    left = tl.sum(hit.to(tl.int32)) - rank
    size = tl.where((rank % BLOCK_M == 0) & (expert < NUM_EXPERTS), tl.minimum(left, BLOCK_M), 0)
    tl.store(tiles_ptr + place, expert * 256 + size, mask=hit)


@triton.jit
def _quantize_groups(x_ptr, out_ptr, group, mask, HW_FP8: tl.constexpr):
    """What is left of groups of 128 columns (in ``x_ptr`` + 128 ``group``, both [N, 1]) after quantisation, in the order in which
    they meet MXFP4 weights."""
    position = tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + group * 128 + _column(position), mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    exponent = fp8_scale_exponent(largest_magnitude(x, 1))[:, None]
    tl.store(out_ptr + group * 128 + position, _round_trip(x, exponent, HW_FP8).to(tl.bfloat16), mask=mask)


@triton.jit
def _column(position):
    """Which column of a group of 128 stands at ``position`` of an activation: columns go in pairs as ``_unpack`` gives them."""
    byte = _stored_column(position, 2) // 2
    return byte // 4 * 8 + position // 64 * 2 + byte // 2 % 2 + byte % 2 * 4


@triton.jit
def _unpack(packed, sf, DTYPE: tl.constexpr):
    """Packed E2M1 uint8 [N, K/2] and E8M0 bytes (int32) [N, K/32] → columns 0, 4, 1, 5 and 2, 6, 3, 7 of each eight, [N, K/2]
    DTYPE each, times 2^-64.

    As in ``unpack_mxfp4``, the shift keeps both factors of a weight in bfloat16's range.
    """
    ROWS: tl.constexpr = packed.shape[0]
    BYTES: tl.constexpr = packed.shape[1]
    exponent = tl.minimum(sf + 62, 255)
    if tl.bfloat16 == DTYPE:
        scale = (exponent << 7).to(tl.uint16)
        scale = tl.broadcast_to(scale[:, :, None], (ROWS, BYTES // 16, 16)).reshape(ROWS, BYTES)
        low, high = tl.inline_asm_elementwise(_UNPACK, "=&r,=&r,=&r,=&r,r,r,r", [packed, scale], (tl.bfloat16, tl.bfloat16), True, 4)
    else:
        scale = tl.broadcast_to(pow2(exponent - 127)[:, :, None], (ROWS, BYTES // 16, 16)).reshape(ROWS, BYTES)
        place = tl.arange(0, 4)[None, None, :]
        eight = tl.sum(packed.reshape(ROWS, BYTES // 4, 4).to(tl.uint32) << (place * 8), 2)[:, :, None]
        first = (place // 2 + place % 2 * 4) * 4
        low = decode_e2m1((eight >> first) & 15).reshape(ROWS, BYTES).to(tl.float32)
        high = decode_e2m1((eight >> (first + 8)) & 15).reshape(ROWS, BYTES).to(tl.float32)
        low, high = (low * 2.0**-126 * scale).to(DTYPE), (high * 2.0**-126 * scale).to(DTYPE)
    return low, high


@triton.jit
def _await_inputs(OVERLAPS: tl.constexpr):
    """Waits for the launch before this one, and lets the one after it begin when all programs are here."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _tile_rows(ROWS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Rows of a weight in the order in which threads load them: [..., 2, warps, 8], where the tensor core's order, which
    ``_as_operand`` restores, is [..., warps, 2, 8]."""
    row = tl.arange(0, ROWS)
    warp = (row // 8) % NUM_WARPS
    half = (row // (8 * NUM_WARPS)) % 2
    return row // (16 * NUM_WARPS) * (16 * NUM_WARPS) + (warp * 2 + half) * 8 + row % 8


@triton.jit
def _as_operand(weight, ROWS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Unpacked [ROWS, 64], rows as of ``_tile_rows`` → rows in order, columns as of ``_column``. No data moves: every
    thread already holds its part."""
    weight = weight.reshape(ROWS // (16 * NUM_WARPS), 2, NUM_WARPS, 8, 4, 4, 2, 2)
    return weight.permute(0, 2, 1, 3, 5, 4, 6, 7).reshape(ROWS, 64)


@triton.jit
def _weight_rows(w_ptr, sf_ptr, row, K: tl.constexpr):
    """Where rows of one expert's weight, and their scales, begin."""
    SF_GROUPS: tl.constexpr = sf_ptr.dtype.element_ty.primitive_bitwidth // 32
    return w_ptr + row * (K // 2), sf_ptr + row * (K // 128 // SF_GROUPS)


@triton.jit
def _product(
    x_rows,
    mask,
    w_rows,
    sf_rows,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """weight · xᵀ [ROWS, BLOCK_M] float32; the rows are pointers [BLOCK_M] and [ROWS]."""
    acc = tl.zeros((ROWS, BLOCK_M), tl.float32)
    byte = tl.arange(0, 64)[None, :]
    block = tl.arange(0, 4)[None, :]
    SF_GROUPS: tl.constexpr = sf_rows.dtype.element_ty.primitive_bitwidth // 32
    for step in tl.range(0, K // (128 * GROUPS), num_stages=STAGES):
        for part in tl.static_range(GROUPS):
            group = step * GROUPS + part
            if part % SF_GROUPS == 0:
                sf = tl.load(sf_rows + group // SF_GROUPS)
            group_sf = (sf >> (part % SF_GROUPS * 32)).to(tl.int32)
            packed = tl.load(w_rows[:, None] + group * 64 + byte)
            low, high = _unpack(packed, (group_sf[:, None] >> (block * 8)) & 255, DTYPE)
            low = _as_operand(low, ROWS, NUM_WARPS)
            high = _as_operand(high, ROWS, NUM_WARPS)
            x = tl.load(x_rows[:, None] + group * 128 + byte, mask=mask[:, None], other=0.0)
            acc = tl.dot(low, x.to(DTYPE).T, acc)
            x = tl.load(x_rows[:, None] + group * 128 + 64 + byte, mask=mask[:, None], other=0.0)
            acc = tl.dot(high, x.to(DTYPE).T, acc)
    return acc * UNDO_SHIFT


@triton.jit
def _gate_up_kernel(
    x_ptr,
    w_ptr,
    stride_w,
    sf_ptr,
    stride_sf,
    pairs_ptr,
    tiles_ptr,
    topk_weights_ptr,
    weighted_ptr,
    arrivals_ptr,
    hidden_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    LIMIT: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program: ROWS / 2 columns of the weighted activation for the pairs of a tile; the last of a group of 128 columns
    quantises it."""
    _await_inputs(OVERLAPS)
    COLUMNS: tl.constexpr = ROWS // 2
    first = tl.program_id(1)
    tile = tl.load(tiles_ptr + first)
    expert, size = (tile // 256).to(tl.int64), tile % 256
    if size == 0:
        return
    # Rows of w1 and w3 alternate by eights, so that a thread holds a column's gate and up.
    order = _tile_rows(ROWS, NUM_WARPS)
    row = tl.program_id(0) * COLUMNS + order // 16 * 8 + order % 8 + order // 8 % 2 * N
    w_rows, sf_rows = _weight_rows(w_ptr + expert * stride_w, sf_ptr + expert * stride_sf, row, K)
    offset = tl.arange(0, BLOCK_M)
    mask = offset < size
    pair = tl.load(pairs_ptr + first + offset, mask=mask, other=0)
    x_rows = x_ptr + pair // TOPK * K
    acc = _product(x_rows, mask, w_rows, sf_rows, K, ROWS, BLOCK_M, GROUPS, DTYPE, NUM_WARPS, STAGES)
    ROUNDED: tl.constexpr = weighted_ptr.dtype.element_ty
    acc = acc.to(ROUNDED).to(tl.float32).reshape(COLUMNS // 8, 2, 8, BLOCK_M).permute(0, 2, 3, 1)
    gate, up = acc.reshape(COLUMNS, BLOCK_M, 2).split()
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    weight = tl.load(topk_weights_ptr + pair, mask=mask, other=0.0)
    weighted = gate / (1.0 + tl.exp(-gate)) * up * weight[None, :]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = (first + offset) * N
    tl.store(weighted_ptr + rows[None, :] + column[:, None], weighted.to(ROUNDED), mask=mask[None, :])

    group = tl.program_id(0) * COLUMNS // 128
    tl.debug_barrier()  # all of the program's columns are stored before it counts as arrived
    if tl.atomic_add(arrivals_ptr + first * (N // 128) + group, 1, sem="acq_rel") == 128 // COLUMNS - 1:
        group_rows = (rows // 128 + group)[:, None]
        _quantize_groups(weighted_ptr, hidden_ptr, group_rows, mask[:, None], HW_FP8)


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    x_ptr,
    w_ptr,
    stride_w,
    sf_ptr,
    stride_sf,
    pairs_ptr,
    tiles_ptr,
    y_ptr,
    arrivals_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    out_ptr,
    num_tokens,
    K: tl.constexpr,
    N: tl.constexpr,
    TOPK: tl.constexpr,
    HAS_MAP: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program: ROWS columns of what an expert gives for the pairs of a tile, each stored at its pair's row of y. With SUMS
    the last program of these columns, of all tiles or places without one, sums them."""
    _await_inputs(OVERLAPS)
    block = tl.program_id(0)
    first = tl.program_id(1)
    tile = tl.load(tiles_ptr + first)
    expert, size = (tile // 256).to(tl.int64), tile % 256
    if size > 0:
        row = block * ROWS + _tile_rows(ROWS, NUM_WARPS)
        w_rows, sf_rows = _weight_rows(w_ptr + expert * stride_w, sf_ptr + expert * stride_sf, row, K)
        offset = tl.arange(0, BLOCK_M)
        mask = offset < size
        x_rows = x_ptr + (first + offset) * K
        acc = _product(x_rows, mask, w_rows, sf_rows, K, ROWS, BLOCK_M, GROUPS, DTYPE, NUM_WARPS, STAGES)
        pair = tl.load(pairs_ptr + first + offset, mask=mask, other=0)
        column = block * ROWS + tl.arange(0, ROWS)
        tl.store(y_ptr + pair[None, :] * N + column[:, None], acc.to(y_ptr.dtype.element_ty), mask=mask[None, :])
    if SUMS:
        tl.debug_barrier()  # all of the program's columns are stored before it counts as arrived
        if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            for token in range(num_tokens):
                _sum_token(y_ptr, topk_ids_ptr, expert_map_ptr, out_ptr, token, block, N, TOPK, HAS_MAP, ROWS)


@triton.jit
def _sum_token(
    y_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    out_ptr,
    token,
    block,
    N: tl.constexpr,
    TOPK: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one token, summed over its experts on this rank, always in the same order."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, triton.next_power_of_2(TOPK))
    pair = token * TOPK + choice
    here = _local_ids(topk_ids_ptr, expert_map_ptr, pair, choice < TOPK, HAS_MAP) >= 0
    mask = here[:, None] & (column < N)[None, :]
    y = tl.load(y_ptr + pair[:, None] * N + column[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(out_ptr + token * N + column, tl.sum(y.to(tl.float32), 0), mask=column < N)


@triton.jit
def _sum_kernel(
    y_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    out_ptr,
    N: tl.constexpr,
    TOPK: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program: BLOCK columns of one token."""
    _await_inputs(OVERLAPS)
    _sum_token(y_ptr, topk_ids_ptr, expert_map_ptr, out_ptr, tl.program_id(0), tl.program_id(1), N, TOPK, HAS_MAP, BLOCK)
