"""``swiglu``: against model.md 4 element by element."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_matches

from vllm_dsv4 import ops


@pytest.mark.parametrize("limit", [0.0, 1.5, 10.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5, 33), (1, 128), (0, 16)], ids=str)
def test_formula(shape: tuple[int, int], weighted: bool, limit: float, generator: torch.Generator, device: torch.device) -> None:
    gate = (torch.randn(shape, generator=generator) * 8).bfloat16()
    up = (torch.randn(shape, generator=generator) * 8).bfloat16()
    weights = torch.rand(shape[0], generator=generator) if weighted else None
    out = ops.swiglu(gate.to(device), up.to(device), limit, torch.bfloat16, None if weights is None else weights.to(device))

    def element(row: int, column: int) -> float:
        g, u = gate[row, column].item(), up[row, column].item()
        if limit:
            g, u = min(g, limit), max(-limit, min(u, limit))
        return g / (1 + math.exp(-g)) * u * (1 if weights is None else weights[row].item())

    exact = [[element(row, column) for column in range(shape[1])] for row in range(shape[0])]
    assert_matches(out, torch.tensor(exact, dtype=torch.float64).view(shape))


def test_gate_has_no_lower_clamp(device: torch.device) -> None:
    gate, up = torch.tensor([[-20.0, 20.0]], device=device), torch.tensor([[1.0, 1.0]], device=device)
    out = ops.swiglu(gate, up, 10.0, torch.float32).cpu()
    assert out[0, 0].item() == pytest.approx(-20 / (1 + math.exp(20)), rel=1e-5)
    assert out[0, 1].item() == pytest.approx(10 / (1 + math.exp(-10)), rel=1e-5)
