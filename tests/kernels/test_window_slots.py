"""``window_slots``: against model.md 3.7, token by token."""

from __future__ import annotations

import pytest
import torch

from vllm_dsv4 import ops


@pytest.mark.parametrize("window", [128, 16, 50])
@pytest.mark.parametrize("page_size", [64, 61, 2])
def test_formula(page_size: int, window: int, generator: torch.Generator, device: torch.device) -> None:
    positions = torch.cat((torch.arange(5), torch.tensor([window - 1, window, 699]), torch.randint(0, 700, (20,), generator=generator)))
    requests = torch.randint(0, 3, positions.shape, generator=generator, dtype=torch.int32)
    block_table = torch.randperm(3 * 700, generator=generator, dtype=torch.int32)[: 3 * (700 // page_size + 1)].view(3, -1)
    out = ops.window_slots(*(t.to(device) for t in (positions, requests, block_table)), window, page_size)
    assert out.dtype == torch.int32 and out.shape == (len(positions), window)
    for slots, position, request in zip(out.tolist(), positions.tolist(), requests.tolist(), strict=True):
        attended = range(max(0, position - window + 1), position + 1)
        expected = [block_table[request, p // page_size].item() * page_size + p % page_size for p in attended]
        assert sorted(slot for slot in slots if slot >= 0) == sorted(expected)
        assert slots.count(-1) == window - len(expected)


def test_no_tokens(device: torch.device) -> None:
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    assert ops.window_slots(nothing, nothing.int(), torch.zeros(1, 1, dtype=torch.int32, device=device), 128, 64).shape == (0, 128)


def test_one_token(device: torch.device) -> None:
    position, request = torch.tensor([130], device=device), torch.zeros(1, dtype=torch.int32, device=device)
    block_table = torch.tensor([[9, 4, 6]], dtype=torch.int32, device=device)
    out = ops.window_slots(position, request, block_table, 4, 64)
    assert sorted(out[0].tolist()) == [4 * 64 + 63, 6 * 64, 6 * 64 + 1, 6 * 64 + 2]
