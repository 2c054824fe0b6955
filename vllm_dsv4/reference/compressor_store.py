"""Keep a token's compressor projections until its windows are pooled (model.md 3.5, 3.8)."""

from __future__ import annotations

import torch


def compressor_store_ref(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """``state_cache[slot] = [kv | gate + ape[position mod r]]``, in float32 (``CompressorStateFormat``).

    Args:
        kv, gate: [T, w].
        ape: [r, w] float32; r is the layer's ratio.
        positions: [T] int64, absolute.
        state_cache: [num_pages, page_size, 2w] float32, strided over pages.
        slot_mapping: [T] int64, -1 = do not write.
    """
    written = (slot_mapping >= 0).nonzero().squeeze(-1)
    slots = slot_mapping[written]
    rows = torch.cat((kv[written].float(), gate[written].float() + ape[positions[written] % ape.shape[0]]), dim=-1)
    page_size = state_cache.shape[1]
    state_cache[slots.div(page_size, rounding_mode="floor"), slots % page_size] = rows
