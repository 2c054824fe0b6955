"""Cache slots of compressed entries: of the selected ones, or of all that a token sees (model.md 3.7)."""

from __future__ import annotations

import torch


def entry_slots_ref(
    num_entries: torch.Tensor,
    token_to_req: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    topk_indices: torch.Tensor | None = None,
    width: int | None = None,
) -> torch.Tensor:
    """Slots of each token's entries, -1 where there is none.

    Args:
        num_entries: [T] int32, entries that each token sees.
        token_to_req: [T] int32, the row of ``block_table`` [num_reqs, num_blocks] int32.
        page_size: entries in a page.
        topk_indices: [T, K] int32, the selected entries, -1 = none. None: all visible entries, in order.
        width: columns of the result when ``topk_indices`` is None: at least the largest of ``num_entries``.

    Returns:
        [T, K] or [T, width] int32: page · page_size + offset.
    """
    if topk_indices is None:
        if width is None:
            raise ValueError("width must be given when topk_indices is None")
        topk_indices = torch.arange(width, device=num_entries.device).expand(num_entries.shape[0], -1)
    present = (topk_indices >= 0) & (topk_indices < num_entries.unsqueeze(-1))
    if block_table.shape[1] == 0:  # nothing is cached, so nothing can be present
        return torch.full_like(present, -1, dtype=torch.int32)
    entry = torch.where(present, topk_indices, 0).long()
    page = block_table[token_to_req.long().unsqueeze(-1), entry // page_size]
    return torch.where(present, page * page_size + entry % page_size, -1).int()
