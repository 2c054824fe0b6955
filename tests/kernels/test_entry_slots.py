"""``entry_slots``: against the definition, entry by entry."""

from __future__ import annotations

import pytest
import torch

from vllm_dsv4 import ops


def make_inputs(page_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_entries = torch.tensor([0, 1, 2, 150, 63, 64, 0, 149], dtype=torch.int32)
    requests = torch.tensor([0, 0, 1, 1, 2, 2, 2, 0], dtype=torch.int32)
    block_table = torch.randperm(1000, generator=generator, dtype=torch.int32)[: 3 * (150 // page_size + 1)].view(3, -1)
    return num_entries, requests, block_table


@pytest.mark.parametrize("page_size", [64, 2, 61])
def test_all_entries(page_size: int, generator: torch.Generator, device: torch.device) -> None:
    num_entries, requests, block_table = make_inputs(page_size, generator)
    out = ops.entry_slots(*(t.to(device) for t in (num_entries, requests, block_table)), page_size, width=151)
    assert out.dtype == torch.int32 and out.shape == (8, 151)
    for slots, count, request in zip(out.tolist(), num_entries.tolist(), requests.tolist(), strict=True):
        expected = [block_table[request, e // page_size].item() * page_size + e % page_size for e in range(count)]
        assert slots == expected + [-1] * (151 - count)


@pytest.mark.parametrize("page_size", [64, 2, 61])
def test_selected_entries(page_size: int, generator: torch.Generator, device: torch.device) -> None:
    num_entries, requests, block_table = make_inputs(page_size, generator)
    topk_indices = torch.randint(-1, 170, (8, 40), generator=generator, dtype=torch.int32)
    out = ops.entry_slots(*(t.to(device) for t in (num_entries, requests, block_table)), page_size, topk_indices=topk_indices.to(device))
    for token, row in enumerate(topk_indices.tolist()):
        table = block_table[requests[token]].tolist()
        expected = [table[e // page_size] * page_size + e % page_size if 0 <= e < num_entries[token] else -1 for e in row]
        assert out[token].tolist() == expected


def test_nothing_to_select(device: torch.device) -> None:
    """No tokens, no columns, nothing visible, nothing selected."""
    zeros = torch.zeros(3, dtype=torch.int32, device=device)
    table = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    assert ops.entry_slots(zeros[:0], zeros[:0], table, 64, width=5).shape == (0, 5)
    assert ops.entry_slots(zeros, zeros, table, 64, width=0).shape == (3, 0)
    none = torch.full((3, 7), -1, dtype=torch.int32, device=device)
    assert torch.equal(ops.entry_slots(zeros, zeros, table, 64, width=7), none)
    assert torch.equal(ops.entry_slots(zeros, zeros, table, 64, topk_indices=none + 1), none)
    assert torch.equal(ops.entry_slots(zeros + 256, zeros, table, 64, topk_indices=none), none)


def test_a_block_table_without_columns(device: torch.device) -> None:
    zeros = torch.zeros(3, dtype=torch.int32, device=device)
    none = torch.full((3, 7), -1, dtype=torch.int32, device=device)
    table = zeros.view(3, 1)[:, :0]
    assert torch.equal(ops.entry_slots(zeros, zeros, table, 64, width=7), none)
    assert torch.equal(ops.entry_slots(zeros, zeros, table, 64, topk_indices=none), none)


def test_a_repeated_index_gives_its_slot_twice(device: torch.device) -> None:
    count, request = torch.tensor([100], dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    table = torch.tensor([[7, 3]], dtype=torch.int32, device=device)
    indices = torch.tensor([[70, 5, 70]], dtype=torch.int32, device=device)
    assert ops.entry_slots(count, request, table, 64, topk_indices=indices).tolist() == [[3 * 64 + 6, 7 * 64 + 5, 3 * 64 + 6]]


def test_needs_indices_or_a_width(device: torch.device) -> None:
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="width"):
        ops.entry_slots(zeros, zeros, zeros.view(1, 1), 64)
