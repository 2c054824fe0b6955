"""``activation_quantize``: scales and bytes from their definition (model.md 5.1)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_dsv4 import ops


def expected_scale(amax: float) -> float:
    quotient = float(np.float32(max(np.float32(1e-4), np.float32(amax))) * np.float32(1 / 448))
    mantissa, exponent = math.frexp(quotient)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "columns", "group_size"), [(63, 512, 128), (1, 128, 128), (3, 4096, 128), (5, 96, 32), (0, 256, 128)]
)
def test_bytes_and_scales(
    num_tokens: int, columns: int, group_size: int, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> None:
    magnitude = (torch.rand(num_tokens, 1, generator=generator) * 24 - 14).exp2()
    x = (torch.randn(num_tokens, columns, generator=generator) * magnitude).to(dtype)
    q, sf = ops.activation_quantize(x.to(device), group_size)
    assert q.dtype == torch.float8_e4m3fn and sf.dtype == torch.float32
    assert q.shape == x.shape and sf.shape == (num_tokens, columns // group_size)
    groups = x.float().unflatten(-1, (columns // group_size, group_size))
    scales = [[expected_scale(float(group.abs().max())) for group in row] for row in groups]
    assert sf.cpu().tolist() == scales
    expected = (groups.double() / sf.cpu().double().unsqueeze(-1)).clamp(-448, 448).float().to(torch.float8_e4m3fn).flatten(-2)
    assert torch.equal(q.cpu().view(torch.uint8), expected.view(torch.uint8))
    # E4M3 has 3 mantissa bits: half a step is 2^-4 of the value, or of the smallest normal number 2^-6.
    error = (q.cpu().double().view_as(groups) * sf.cpu().double().unsqueeze(-1) - groups.double()).abs()
    assert (error <= 2.0**-4 * torch.maximum(groups.abs().double(), 2.0**-6 * sf.cpu().double().unsqueeze(-1))).all()


def test_special_groups(device: torch.device) -> None:
    x = torch.zeros(6, 128)
    x[0, 3], x[1, 3], x[2, 3], x[3, 3], x[4, 3] = 448.0, 448.1, 2.0**-140, -math.inf, math.nan
    q, sf = (t.cpu() for t in ops.activation_quantize(x.to(device)))
    assert sf[[0, 1, 2, 5], 0].tolist() == [1.0, 2.0, 2.0**-22, 2.0**-22]
    assert q[0, 3].item() == 448.0 and q[1, 3].item() == 224.0 and not q[[2, 5]].float().any()
    assert (q[3:5].float() * sf[3:5]).isnan().all()


def test_refuses_a_ragged_group(device: torch.device) -> None:
    with pytest.raises(ValueError, match="192"):
        ops.activation_quantize(torch.ones(2, 192, device=device))


def test_does_not_depend_on_the_batch(generator: torch.Generator, device: torch.device) -> None:
    x = torch.randn(65, 256, generator=generator).bfloat16().to(device)
    q, sf = ops.activation_quantize(x)
    for token in (0, 31, 64):
        alone = ops.activation_quantize(x[token : token + 1])
        assert torch.equal(alone[0].view(torch.uint8)[0], q.view(torch.uint8)[token]) and torch.equal(alone[1][0], sf[token])
