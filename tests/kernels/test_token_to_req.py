"""``token_to_req``: against a loop over requests."""

from __future__ import annotations

import pytest
import torch

from vllm_dsv4 import ops


@pytest.mark.parametrize("lengths", [[1], [3, 1, 5], [1] * 300, [129, 0, 0, 128, 1], [0, 2]], ids=str)
@pytest.mark.parametrize("padding", [0, 1, 200])
def test_loop(lengths: list[int], padding: int, device: torch.device) -> None:
    query_start_loc = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    out = ops.token_to_req(query_start_loc, sum(lengths) + padding)
    expected = [request for request, length in enumerate(lengths) for _ in range(length)] + [len(lengths) - 1] * padding
    assert out.dtype == torch.int32 and out.tolist() == expected


def test_tail_of_a_padded_batch(device: torch.device) -> None:
    """A graph for four requests that serves two: the requests that are not there begin where the tokens end."""
    query_start_loc = torch.tensor([0, 2, 3, 3, 3], dtype=torch.int32, device=device)
    assert ops.token_to_req(query_start_loc, 4).tolist() == [0, 0, 1, 3]


def test_no_tokens(device: torch.device) -> None:
    assert ops.token_to_req(torch.zeros(2, dtype=torch.int32, device=device), 0).shape == (0,)
