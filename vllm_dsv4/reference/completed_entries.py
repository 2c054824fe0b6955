"""Which compressed entries tokens see, and which they complete (model.md 3.5)."""

from __future__ import annotations

import torch


def completed_entries_ref(
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    token_to_req: torch.Tensor,
    block_table: torch.Tensor,
    compress_ratio: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entry e pools up to token ``(e + 1) * compress_ratio - 1``: that token completes it, and sees it from then on.

    Args:
        positions: [T] int64.
        slot_mapping: [T] int64, the slot of the token; only -1 = padding counts.
        token_to_req: [T] int32, the row of ``block_table`` [R, num_blocks] int32.
        compress_ratio: tokens of an entry.
        page_size: entries in a page.

    Returns:
        ``num_entries`` [T] int32, the entries that the token sees, and ``entry_slots`` [T] int64: page · page_size + offset of
        the entry that it completes, or -1. Padding sees and completes none.
    """
    is_padding = slot_mapping < 0
    num_entries = ((positions + 1) // compress_ratio).masked_fill(is_padding, 0).int()
    completes = ((positions + 1) % compress_ratio == 0) & ~is_padding
    entry = torch.where(completes, positions // compress_ratio, 0)
    page = block_table[token_to_req.long(), entry // page_size].long()
    return num_entries, torch.where(completes, page * page_size + entry % page_size, -1)
