"""Pool a window of tokens into one compressed entry and write it to its cache (model.md 3.5, 5.2-5.4)."""

from __future__ import annotations

import torch

from vllm_dsv4.quantization.formats import CacheFormat, IndexerMXFP4Format, cache_format
from vllm_dsv4.reference.numerics import hadamard, rms_normalize, row_tiles, scatter_entries
from vllm_dsv4.reference.rope import apply_rope


def compress_insert_ref(
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
    """For every token with an entry slot: pool the rows of its window(s), norm, rotate at its window's first position, write.

    The state rows of the whole step must have been stored before. Rows before a sequence's start are masked: what their
    pages hold has no influence.

    Args:
        state_cache: [num_pages, page_size, 2w] float32, rows of ``CompressorStateFormat``; w = 2d at ratio 4, else d.
        state_block_table: [num_reqs, num_blocks] int32, pages of ``state_cache`` by position.
        token_to_req: [T] int32, row of ``state_block_table``.
        positions: [T] int64; where a slot is given, the last position of a window: ``(position + 1) mod r = 0``.
        norm_weight: [d].
        eps: ``rms_norm_eps``.
        cos_sin_cache: [num_positions, rope_dim] float32, the compressed layers' table.
        cache: [num_pages, page_size, entry]: packed KV, indexer FP8, indexer MXFP4 (the Hadamard rotation is applied), or rows.
        entry_slots: [T] int64, -1 = this token completes no window.
        compress_ratio: r, 4 (overlapping windows) or another number of tokens (plain windows).
        official_rounding: round to the model's dtype after pooling and after the norm, as the official code does; else keep
            float32 until after the rotation, as vLLM does (model.md 5.4). Without effect on a float32 cache.
    """
    fmt = cache_format(cache.dtype, cache.shape[-1])
    boundary = (entry_slots >= 0).nonzero().squeeze(-1)
    window = 2 * compress_ratio if compress_ratio == 4 else compress_ratio
    for tile in row_tiles(boundary.numel(), window * state_cache.shape[-1]):
        tokens = boundary[tile]
        position = positions[tokens]
        pooled = _pool_windows(state_cache, state_block_table, token_to_req[tokens], position, compress_ratio, fmt.head_dim)
        cos_sin = cos_sin_cache[position // compress_ratio * compress_ratio]
        entries = _finish_entries(pooled, norm_weight, eps, cos_sin, fmt, fmt.value_dtype if official_rounding else torch.float32)
        scatter_entries(cache, entry_slots[tokens], entries)


def _pool_windows(
    state_cache: torch.Tensor,
    block_table: torch.Tensor,
    request: torch.Tensor,
    last_position: torch.Tensor,
    compress_ratio: int,
    head_dim: int,
) -> torch.Tensor:
    """Softmax-weighted sum over each window, per channel: request [N], last_position [N] → float32 [N, head_dim]."""
    overlapping = compress_ratio == 4
    window = 2 * compress_ratio if overlapping else compress_ratio
    position = last_position.unsqueeze(-1) + torch.arange(1 - window, 1, device=last_position.device)  # [N, window]
    present = position >= 0
    position = position.clamp(min=0)  # an absent row is read as row 0, which such a window contains, and masked below
    page_size = state_cache.shape[1]
    page = block_table[request.unsqueeze(-1), position // page_size].long()
    rows = state_cache[page, position % page_size]  # [N, window, 2w]
    kv, gate = rows.chunk(2, dim=-1)
    if overlapping:  # the previous window's tokens give their first halves, the own window's tokens their second
        kv, gate = (torch.cat((part[:, :compress_ratio, :head_dim], part[:, compress_ratio:, head_dim:]), dim=1) for part in (kv, gate))
    weights = gate.double().masked_fill(~present.unsqueeze(-1), -torch.inf).softmax(dim=1)
    return (weights * kv.double()).sum(dim=1).float()


def _finish_entries(
    pooled: torch.Tensor, norm_weight: torch.Tensor, eps: float, cos_sin: torch.Tensor, fmt: CacheFormat, dtype: torch.dtype
) -> torch.Tensor:
    """Norm, rotate and (MXFP4) Hadamard; ``dtype`` is what values are rounded to on the way → [N, head_dim] of ``fmt.value_dtype``."""
    normed = (rms_normalize(pooled.to(dtype).double(), eps) * norm_weight.double()).to(dtype)
    entries = apply_rope(normed.double(), cos_sin).to(fmt.value_dtype)
    if isinstance(fmt, IndexerMXFP4Format):
        entries = hadamard(entries.double()).to(fmt.value_dtype)
    return entries
