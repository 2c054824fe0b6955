"""``swiglu``: against model.md 4 element by element, and against transformers' MLP."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_independent_of_batch, assert_matches

from vllm_dsv4 import ops


@pytest.mark.parametrize("limit", [0.0, 1.5, 10.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 33), (1, 128), (0, 16)], ids=str)
def test_formula(
    shape: tuple[int, int], out_dtype: torch.dtype, weighted: bool, limit: float, generator: torch.Generator, device: torch.device
) -> None:
    gate = (torch.randn(shape, generator=generator) * 8).bfloat16()
    up = (torch.randn(shape, generator=generator) * 8).bfloat16()
    weights = torch.rand(shape[0], generator=generator) if weighted else None
    out = ops.swiglu(gate.to(device), up.to(device), limit, out_dtype, None if weights is None else weights.to(device))

    def element(row: int, column: int) -> float:
        g, u = gate[row, column].item(), up[row, column].item()
        if limit:
            g, u = min(g, limit), max(-limit, min(u, limit))
        return g / (1 + math.exp(-g)) * u * (1 if weights is None else weights[row].item())

    exact = [[element(row, column) for column in range(shape[1])] for row in range(shape[0])]
    assert out.dtype == out_dtype
    assert_matches(out, torch.tensor(exact, dtype=torch.float64).view(shape))


def test_gate_has_no_lower_clamp(device: torch.device) -> None:
    gate, up = torch.tensor([[-20.0, 20.0]], device=device), torch.tensor([[1.0, 1.0]], device=device)
    out = ops.swiglu(gate, up, 10.0, torch.float32).cpu()
    assert out[0, 0].item() == pytest.approx(-20 / (1 + math.exp(20)), rel=1e-5)
    assert out[0, 1].item() == pytest.approx(10 / (1 + math.exp(-10)), rel=1e-5)


def test_does_not_depend_on_the_batch(generator: torch.Generator, device: torch.device) -> None:
    gate, up, weights = (torch.randn(shape, generator=generator).to(device) * 8 for shape in ((65, 48), (65, 48), (65,)))
    assert_independent_of_batch(lambda rows: ops.swiglu(gate[rows], up[rows], 10.0, torch.float32, weights[rows]), 65)


def test_transformers(generator: torch.Generator, device: torch.device) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(hidden_size=16, moe_intermediate_size=24, num_hidden_layers=2, swiglu_limit=10.0)
    module = modeling.DeepseekV4MLP(config).float()
    for linear in (module.gate_proj, module.up_proj, module.down_proj):
        linear.weight.data.copy_(torch.randn(linear.weight.shape, generator=generator))
    x = torch.randn(9, 16, generator=generator) * 4
    with torch.inference_mode():
        gate, up = module.gate_proj(x), module.up_proj(x)
        theirs = module(x)
    assert gate.max() > 10 and up.min() < -10  # both clamps are in use
    hidden = ops.swiglu(gate.to(device), up.to(device), 10.0, torch.float32).cpu()
    torch.testing.assert_close(hidden @ module.down_proj.weight.data.T, theirs, atol=1e-4, rtol=1e-5)
