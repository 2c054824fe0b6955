"""``completed_entries``: against model.md 3.5, token by token."""

from __future__ import annotations

import pytest
import torch

from vllm_dsv4 import ops


@pytest.mark.parametrize(("ratio", "page_size"), [(4, 64), (128, 2), (4, 3)])
def test_formula(ratio: int, page_size: int, generator: torch.Generator, device: torch.device) -> None:
    positions = torch.cat(
        (torch.arange(10), torch.tensor([ratio - 1, ratio, 2 * ratio - 1]), torch.randint(0, 5000, (200,), generator=generator))
    )
    slots = torch.randint(-1, 3, positions.shape, generator=generator)
    requests = torch.randint(0, 3, positions.shape, generator=generator, dtype=torch.int32)
    num_blocks = 5000 // (ratio * page_size) + 1
    block_table = torch.randperm(3 * num_blocks, generator=generator, dtype=torch.int32).view(3, -1)
    num_entries, entry_slots = ops.completed_entries(*(t.to(device) for t in (positions, slots, requests, block_table)), ratio, page_size)
    assert num_entries.dtype == torch.int32 and entry_slots.dtype == torch.int64
    rows = zip(positions.tolist(), slots.tolist(), requests.tolist(), num_entries.tolist(), entry_slots.tolist(), strict=True)
    for position, slot, request, seen, written in rows:
        complete = [entry for entry in range(position + 1) if (entry + 1) * ratio - 1 <= position]
        assert seen == (0 if slot < 0 else len(complete))
        if slot < 0 or not complete or (complete[-1] + 1) * ratio - 1 != position:
            assert written == -1
        else:
            page, offset = divmod(complete[-1], page_size)
            assert written == block_table[request, page].item() * page_size + offset


def test_pages_beyond_32_bits(device: torch.device) -> None:
    """Slots are 64-bit: page 2^26 of 64 entries begins at slot 2^32."""
    position, slot, request = (
        torch.tensor([3], device=device),
        torch.zeros(1, dtype=torch.long, device=device),
        torch.zeros(1, device=device),
    )
    block_table = torch.tensor([[2**26]], dtype=torch.int32, device=device)
    assert ops.completed_entries(position, slot, request.int(), block_table, 4, 64)[1].tolist() == [2**32]


def test_no_tokens(device: torch.device) -> None:
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    out = ops.completed_entries(nothing, nothing, nothing.int(), torch.zeros(1, 1, dtype=torch.int32, device=device), 4, 64)
    assert [tensor.shape for tensor in out] == [(0,), (0,)]
