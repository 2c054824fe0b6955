"""``rms_norm``: against model.md 3.1 row by row."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_independent_of_batch, assert_matches

from vllm_dsv4 import ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(63, 4096), (1, 512), (4001, 100), (0, 512)], ids=str)
def test_formula(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> None:
    x = (torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator).mul(8).exp2()).to(dtype)
    weight = (1 + 0.3 * torch.randn(shape[1], generator=generator)).to(dtype)
    out = ops.rms_norm(x.to(device), weight.to(device), 1e-6)
    mean_square = torch.stack([row.double().pow(2).sum() / shape[1] for row in x]) if shape[0] else torch.zeros(0, dtype=torch.float64)
    assert out.dtype == dtype
    assert_matches(out, x.double() / (mean_square + 1e-6).sqrt().unsqueeze(-1) * weight.double())


def test_eps_decides_for_tiny_rows(device: torch.device) -> None:
    x = torch.full((2, 64), 1e-5, device=device)
    assert torch.allclose(ops.rms_norm(x, torch.ones(64, device=device), 1e-2).cpu(), torch.full((2, 64), 1e-4), rtol=1e-4)
    assert torch.equal(ops.rms_norm(torch.zeros_like(x), torch.ones(64, device=device), 1e-6).cpu(), torch.zeros(2, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_does_not_depend_on_the_batch(dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> None:
    x, weight = (torch.randn(shape, generator=generator).to(device, dtype) for shape in ((65, 300), (300,)))
    assert_independent_of_batch(lambda rows: ops.rms_norm(x[rows], weight, 1e-6), 65)
