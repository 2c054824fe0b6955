"""What the hyper-connection kernels share: logits of the weights over the streams, then the weights and the mix.

Two launches. The first cuts the hidden size into splits; a program merges a block's output into its columns of the streams
(where there is one), and writes the products of these columns with ``fn`` and their sum of squares. The second adds the
splits in their order, so that the result does not depend on scheduling, and mixes.

``fn`` is float32. For few tokens its products are float32 too. For many they are bfloat16 on tensor cores, with ``fn`` as the
sum of three bfloat16 parts, which together hold its 24 bits, while bfloat16 streams are exact as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._launch import Capability, capability, dot_dtype, launch


@dataclass(frozen=True)
class Tile:
    """A program's share of the first launch: tokens, and ``num_blocks`` times ``block_d`` columns of every stream."""

    block_t: int
    block_d: int
    num_blocks: int
    num_warps: int
    num_stages: int = 1
    parts_first: bool = False
    """Whether a launch of its own writes the parts of ``fn``, which every program else makes for itself."""


@dataclass(frozen=True)
class BlockOutput:
    """What ``hc_post`` merges into the streams: a block's output and the weights."""

    x: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


@dataclass(frozen=True)
class Mixed:
    """The streams after the merge (the given ones without), the mix, and the weights of the next merge (None without)."""

    streams: torch.Tensor
    x: torch.Tensor
    post: torch.Tensor | None
    comb: torch.Tensor | None


def _tile(num_tokens: int, dtype: torch.dtype, gpu: Capability) -> Tile:
    """With one token a tile the products are float32, else bfloat16."""
    if dtype != torch.bfloat16:
        return Tile(1, 32, 1, 4) if num_tokens <= 64 else Tile(1, 256, 1, 4)
    if num_tokens <= 4:
        return Tile(1, 32, 1, 4)
    if num_tokens <= 64:
        return Tile(16, 32, 1, 4)
    if num_tokens <= 1024:
        # What does not spill.
        return Tile(16, 32, 8, 4, 3) if gpu[0] in (9, 10) else Tile(16, 32, 8, 8, 2)
    return Tile(32, 32, 32, 4, 3, parts_first=True)


def _overlaps(device: torch.device) -> bool:
    """Whether a launch may begin before the previous one has ended, up to where it waits for it."""
    return capability(device) >= (9, 0)


def _mix_warps(num_tokens: int, block_d: int) -> int:
    return min(8, max(1, block_d // 512))


def mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int | None = None,
    block_output: BlockOutput | None = None,
    norm_weight: torch.Tensor | None = None,
) -> Mixed:
    """``hc_head``; with ``sinkhorn_iters`` ``hc_pre``, after ``hc_post`` of a ``block_output``, before the norm of ``norm_weight``."""
    num_tokens, m, width = streams.shape
    device, rows = streams.device, fn.shape[0]
    streams = streams if streams.stride(2) == 1 else streams.contiguous()
    tile = _tile(num_tokens, streams.dtype, capability(device))
    num_splits = triton.cdiv(width, tile.block_d * tile.num_blocks)
    rows_p = max(16, triton.next_power_of_2(rows + 1))
    partials = torch.empty(num_splits, num_tokens, rows_p, dtype=torch.float32, device=device)
    merged = x = post = comb = None
    if block_output is not None:
        x, post, comb = block_output.x, block_output.post.contiguous(), block_output.comb.contiguous()
        x = x if x.stride(1) == 1 else x.contiguous()
        merged = torch.empty(num_tokens, m, width, dtype=streams.dtype, device=device)
    fn = _split_into_parts(fn.contiguous()) if tile.parts_first else fn.contiguous()
    arguments = (
        streams,
        x,
        post,
        comb,
        fn,
        merged,
        partials,
        streams.stride(0),
        streams.stride(1),
        0 if x is None else x.stride(0),
        num_tokens,
    )
    overlaps = _overlaps(device)
    sizes = {"M": m, "D": width, "ROWS": rows, "ROWS_P": rows_p, "BLOCK_D": tile.block_d, "OVERLAPS": overlaps, "num_warps": tile.num_warps}
    if tile.block_t == 1:
        launch(_products_kernel, (num_tokens, num_splits), *arguments, **sizes)
    else:
        launch(
            _dot_products_kernel,
            (triton.cdiv(num_tokens, tile.block_t), num_splits),
            *arguments,
            **sizes,
            BLOCK_T=tile.block_t,
            NUM_BLOCKS=tile.num_blocks,
            DOT_DTYPE=dot_dtype(device),
            num_stages=tile.num_stages,
        )
    streams = streams if merged is None else merged
    out = torch.empty(num_tokens, width, dtype=streams.dtype, device=device)
    post = comb = None
    splits_p = triton.next_power_of_2(num_splits)
    weight_tokens = max(1, 128 // splits_p)
    num_programs = num_tokens
    if sinkhorn_iters is not None:
        post = torch.empty(num_tokens, m, dtype=torch.float32, device=device)
        comb = torch.empty(num_tokens, m, m, dtype=torch.float32, device=device)
        num_programs += triton.cdiv(num_tokens, weight_tokens)
    block = triton.next_power_of_2(width)
    launch(
        _mix_kernel,
        (num_programs,),
        streams,
        partials,
        scale,
        base,
        norm_weight,
        out,
        post,
        comb,
        streams.stride(0),
        streams.stride(1),
        num_tokens,
        M=m,
        M_P=triton.next_power_of_2(m),
        D=width,
        ROWS_P=rows_p,
        SQUARES=rows,
        NUM_SPLITS=num_splits,
        SPLITS_P=splits_p,
        RMS_EPS=rms_eps,
        HC_EPS=hc_eps,
        SINKHORN_ITERS=sinkhorn_iters,
        BLOCK_D=block,
        BLOCK_T=weight_tokens,
        OVERLAPS=overlaps,
        num_warps=_mix_warps(num_tokens, block),
        **({"launch_pdl": True} if overlaps else {}),
    )
    return Mixed(streams, out, post, comb)


def _split_into_parts(fn: torch.Tensor) -> torch.Tensor:
    """[N, K] float32 → [3, N, K] bfloat16 parts, whose sum it is."""
    parts = torch.empty(3, *fn.shape, dtype=torch.bfloat16, device=fn.device)
    block = 1024
    launch(_parts_kernel, (triton.cdiv(fn.numel(), block),), fn, parts, SIZE=fn.numel(), BLOCK=block, num_warps=4)
    return parts


@triton.jit
def _parts_kernel(fn_ptr, parts_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < SIZE
    parts = _parts(tl.load(fn_ptr + index, mask=mask, other=0.0))
    for part in tl.static_range(3):
        tl.store(parts_ptr + part * SIZE + index, parts[part], mask=mask)


@triton.jit
def _parts(weight):
    high = weight.to(tl.bfloat16)
    rest = weight - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return (rest - middle.to(tl.float32)).to(tl.bfloat16), middle, high


@triton.jit
def _load_parts(fn_ptr, offset, mask, SIZE: tl.constexpr):
    """The parts of elements of ``fn``, smallest first, from ``fn`` or from what ``_split_into_parts`` has written."""
    if fn_ptr.dtype.element_ty == tl.float32:
        return _parts(tl.load(fn_ptr + offset, mask=mask, other=0.0))
    else:
        low = tl.load(fn_ptr + offset, mask=mask, other=0.0)
        middle = tl.load(fn_ptr + SIZE + offset, mask=mask, other=0.0)
        return low, middle, tl.load(fn_ptr + 2 * SIZE + offset, mask=mask, other=0.0)


@triton.jit
def load_streams(streams_ptr, stride_stream, mask, M: tl.constexpr):
    """The M streams at the pointers of stream 0, as float32."""
    streams = tl.tuple(())
    for i in tl.static_range(M):
        streams = streams + (tl.load(streams_ptr + i * stride_stream, mask=mask, other=0.0).to(tl.float32),)
    return streams


@triton.jit
def merge(x, streams, post_ptr, comb_ptr, dtype: tl.constexpr, M: tl.constexpr):
    """``hc_post`` in float32, rounded to ``dtype``: M tiles; ``post_ptr`` and ``comb_ptr`` point at the weights of the tile's tokens."""
    merged = tl.tuple(())
    for j in tl.static_range(M):
        value = tl.load(post_ptr + j) * x
        for i in tl.static_range(M):
            value += tl.load(comb_ptr + (i * M + j)) * streams[i]
        merged = merged + (value.to(dtype),)
    return merged


@triton.jit(do_not_specialize=["num_tokens"])
def _products_kernel(
    streams_ptr,
    x_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    merged_ptr,
    partials_ptr,
    stride_token,
    stride_stream,
    stride_x,
    num_tokens,
    M: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program: ``BLOCK_D`` columns of every stream of one token, in float32."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    column = split * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = column < D
    row = tl.arange(0, ROWS_P)
    streams = load_streams(streams_ptr + token * stride_token + column, stride_stream, mask, M)
    if x_ptr is not None:
        x = tl.load(x_ptr + token * stride_x + column, mask=mask, other=0.0).to(tl.float32)
        streams = merge(x, streams, post_ptr + token * M, comb_ptr + token * (M * M), merged_ptr.dtype.element_ty, M)
        for j in tl.static_range(M):
            tl.store(merged_ptr + (token * M + j) * D + column, streams[j], mask=mask)
    products = tl.zeros([ROWS_P, BLOCK_D], tl.float32)
    squares = tl.zeros([BLOCK_D], tl.float32)
    for j in tl.static_range(M):
        value = streams[j].to(tl.float32)
        weight = tl.load(fn_ptr + row[:, None] * (M * D) + (j * D + column)[None, :], mask=(row < ROWS)[:, None] & mask[None, :], other=0.0)
        products += weight * value[None, :]
        squares += value * value
    sums = tl.where(row == ROWS, tl.sum(squares), tl.sum(products, 1))
    tl.store(partials_ptr + (split.to(tl.int64) * num_tokens + token) * ROWS_P + row, sums)


@triton.jit(do_not_specialize=["num_tokens"])
def _dot_products_kernel(
    streams_ptr,
    x_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    merged_ptr,
    partials_ptr,
    stride_token,
    stride_stream,
    stride_x,
    num_tokens,
    M: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """One program: ``NUM_BLOCKS`` times ``BLOCK_D`` columns of every stream of ``BLOCK_T`` tokens, on tensor cores."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    split = tl.program_id(1)
    row = tl.arange(0, ROWS_P)
    sums = tl.zeros([BLOCK_T, ROWS_P], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for block in range(NUM_BLOCKS):
        column = (split * NUM_BLOCKS + block) * BLOCK_D + tl.arange(0, BLOCK_D)
        mask = is_token[:, None] & (column < D)[None, :]
        streams = load_streams(streams_ptr + (token * stride_token)[:, None] + column[None, :], stride_stream, mask, M)
        if x_ptr is not None:
            x = tl.load(x_ptr + (token * stride_x)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
            known = tl.minimum(token, num_tokens - 1)
            post, comb = post_ptr + (known * M)[:, None], comb_ptr + (known * (M * M))[:, None]
            streams = merge(x, streams, post, comb, merged_ptr.dtype.element_ty, M)
            for j in tl.static_range(M):
                tl.store(merged_ptr + ((token * M + j) * D)[:, None] + column[None, :], streams[j], mask=mask)
        # A sum of its own for every step: tensor cores truncate what they add to, which biases long sums.
        step = tl.zeros([BLOCK_T, ROWS_P], tl.float32)
        for j in tl.static_range(M):
            value = streams[j].to(tl.float32)
            squares += value * value
            value = value.to(DOT_DTYPE)
            offset = row[None, :] * (M * D) + (j * D + column)[:, None]
            parts = _load_parts(fn_ptr, offset, (row < ROWS)[None, :] & (column < D)[:, None], ROWS * M * D)
            for part in tl.static_range(3):
                step = tl.dot(value, parts[part].to(DOT_DTYPE), step)
        sums += step
    sums = tl.where((row == ROWS)[None, :], tl.sum(squares, 1)[:, None], sums)
    partials = partials_ptr + (split.to(tl.int64) * num_tokens + token)[:, None] * ROWS_P + row[None, :]
    tl.store(partials, sums, mask=is_token[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _mix_kernel(
    streams_ptr,
    partials_ptr,
    scale_ptr,
    base_ptr,
    norm_weight_ptr,
    out_ptr,
    post_ptr,
    comb_ptr,
    stride_token,
    stride_stream,
    num_tokens,
    M: tl.constexpr,
    M_P: tl.constexpr,
    D: tl.constexpr,
    ROWS_P: tl.constexpr,
    SQUARES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_P: tl.constexpr,
    RMS_EPS: tl.constexpr,
    HC_EPS: tl.constexpr,
    SINKHORN_ITERS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program: the mix of one token; where weights are wanted, further programs: those of ``BLOCK_T`` tokens."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    if program < num_tokens:
        # The last tokens first: they are in the L2 cache still.
        token = (num_tokens - 1 - program).to(tl.int64)
        column = tl.arange(0, BLOCK_D)
        mask = column < D
        streams = load_streams(streams_ptr + token * stride_token + column, stride_stream, mask, M)
        # One sum over the splits for all that is needed: the logits, and at place M the sum of squares.
        split = tl.arange(0, SPLITS_P)
        place = tl.arange(0, 2 * M_P)
        partials = partials_ptr + (split.to(tl.int64) * num_tokens + token)[:, None] * ROWS_P + tl.where(place < M, place, SQUARES)[None, :]
        sums = tl.sum(tl.load(partials, mask=(split < NUM_SPLITS)[:, None] & (place <= M)[None, :], other=0.0), 0)
        inverse = _inverse_rms(tl.sum(tl.where(place == M, sums, 0.0)), M * D, RMS_EPS)
        base = tl.load(base_ptr + place, mask=place < M, other=0.0)
        pre = tl.sigmoid(tl.load(scale_ptr) * (sums * inverse) + base) + HC_EPS
        out = tl.zeros([BLOCK_D], tl.float32)
        for j in tl.static_range(M):
            out += tl.sum(tl.where(place == j, pre, 0.0)) * streams[j]
        out = out.to(out_ptr.dtype.element_ty)
        if norm_weight_ptr is not None:
            value = out.to(tl.float32)
            value *= _inverse_rms(tl.sum(value * value), D, RMS_EPS)
            out = (value * tl.load(norm_weight_ptr + column, mask=mask, other=0.0).to(tl.float32)).to(out.dtype)
        tl.store(out_ptr + token * D + column, out, mask=mask)
    elif SINKHORN_ITERS is not None:
        _store_weights(
            program - num_tokens, partials_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, num_tokens,
            M, M_P, D, ROWS_P, SQUARES, NUM_SPLITS, SPLITS_P, RMS_EPS, HC_EPS, SINKHORN_ITERS, BLOCK_T,
        )  # fmt: skip


@triton.jit
def _inverse_rms(sum_of_squares, COUNT: tl.constexpr, EPS: tl.constexpr):
    return tl.rsqrt(sum_of_squares / COUNT + EPS)


@triton.jit
def _store_weights(
    block,
    partials_ptr,
    scale_ptr,
    base_ptr,
    post_ptr,
    comb_ptr,
    num_tokens,
    M: tl.constexpr,
    M_P: tl.constexpr,
    D: tl.constexpr,
    ROWS_P: tl.constexpr,
    SQUARES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_P: tl.constexpr,
    RMS_EPS: tl.constexpr,
    HC_EPS: tl.constexpr,
    SINKHORN_ITERS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """``post`` and ``comb`` of a block of ``BLOCK_T`` tokens."""
    token = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    split = tl.arange(0, SPLITS_P)[None, :]
    partials_ptr += (split.to(tl.int64) * num_tokens + token[:, None]) * ROWS_P
    mask = is_token[:, None] & (split < NUM_SPLITS)
    inverse = _inverse_rms(tl.sum(tl.load(partials_ptr + SQUARES, mask=mask, other=0.0), 1), M * D, RMS_EPS)[:, None]

    j = tl.arange(0, M_P)
    logits = tl.sum(
        tl.load(partials_ptr[:, :, None] + (M + j)[None, None, :], mask=mask[:, :, None] & (j < M)[None, None, :], other=0.0), 1
    )
    base = tl.load(base_ptr + M + j, mask=j < M, other=0.0)[None, :]
    post = 2.0 * tl.sigmoid(tl.load(scale_ptr + 1) * (logits * inverse) + base)
    tl.store(post_ptr + (token * M)[:, None] + j[None, :], post, mask=is_token[:, None] & (j < M)[None, :])

    element = tl.arange(0, M_P * M_P)
    offset = element // M_P * M + element % M_P
    valid = (element // M_P < M) & (element % M_P < M)
    logits = tl.sum(
        tl.load(partials_ptr[:, :, None] + (2 * M + offset)[None, None, :], mask=mask[:, :, None] & valid[None, None, :], other=0.0), 1
    )
    base = tl.load(base_ptr + 2 * M + offset, mask=valid, other=0.0)[None, :]
    logits = tl.where(valid[None, :], tl.load(scale_ptr + 2) * (logits * inverse) + base, -1e30)
    comb = _sinkhorn(logits.reshape(BLOCK_T, M_P, M_P), valid.reshape(1, M_P, M_P), HC_EPS, SINKHORN_ITERS)
    comb = comb.reshape(BLOCK_T, M_P * M_P)
    tl.store(comb_ptr + (token * (M * M))[:, None] + offset[None, :], comb, mask=is_token[:, None] & valid[None, :])


@triton.jit
def _sinkhorn(logits, valid, EPS: tl.constexpr, ITERS: tl.constexpr):
    """Towards a doubly stochastic matrix, ending on columns: [BLOCK_T, M_P, M_P] → same; zeros where not ``valid``."""
    comb = tl.exp(logits - tl.max(logits, 2)[:, :, None])
    comb = tl.where(valid, comb / tl.sum(comb, 2)[:, :, None] + EPS, 0.0)
    comb = comb / (tl.sum(comb, 1)[:, None, :] + EPS)
    for _ in range(ITERS - 1):
        comb = comb / (tl.sum(comb, 2)[:, :, None] + EPS)
        comb = comb / (tl.sum(comb, 1)[:, None, :] + EPS)
    return comb
