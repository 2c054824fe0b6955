"""Cache slots of the tokens in each token's sliding window (model.md 3.7)."""

from __future__ import annotations

import torch


def window_slots_ref(
    positions: torch.Tensor, token_to_req: torch.Tensor, block_table: torch.Tensor, window: int, page_size: int
) -> torch.Tensor:
    """Slots of positions ``max(0, p - window + 1) … p``, newest first, -1 where there is none.

    Args:
        positions: [T] int64.
        token_to_req: [T] int32, the row of ``block_table`` [num_reqs, num_blocks] int32.
        window: tokens attended to, the query's own included.
        page_size: tokens in a page.

    Returns:
        [T, window] int32: page · page_size + offset.
    """
    position = positions.unsqueeze(-1) - torch.arange(window, device=positions.device)
    present = position >= 0
    position = position.clamp(min=0)
    page = block_table[token_to_req.long().unsqueeze(-1), position // page_size]
    return torch.where(present, page * page_size + position % page_size, -1).int()
