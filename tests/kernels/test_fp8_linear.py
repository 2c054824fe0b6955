"""``fp8_linear``: against model.md 5.1 written with numpy's ``frexp``, group by group and block by block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tolerances import assert_independent_of_batch, assert_matches

from vllm_dsv4 import ops
from vllm_dsv4.kernels._launch import assume_capability


def quantise(x: torch.Tensor) -> torch.Tensor:
    """What an FP8 linear layer makes of activations [T, K], in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for start in range(0, x.shape[1], 128):
        group = x[:, start : start + 128].float()
        amax = np.maximum(group.abs().amax(1).numpy(), np.float32(1e-4)) * np.float32(1 / 448)
        mantissa, exponent = np.frexp(amax)
        scale = torch.from_numpy(np.ldexp(1.0, exponent - (mantissa == 0.5))).unsqueeze(1)
        out[:, start : start + 128] = (group.double() / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale
    return out


def widen(weight: torch.Tensor, weight_sf: torch.Tensor) -> torch.Tensor:
    out = weight.double()
    for row in range(weight_sf.shape[0]):
        for column in range(weight_sf.shape[1]):
            out[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128] *= weight_sf[row, column].double()
    return out


def make_weight(num_out: int, size: int, generator: torch.Generator, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    weight = (torch.randn(num_out, size, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    exponent = torch.randint(-12, 3, (-(-num_out // 128), -(-size // 128)), generator=generator).float()
    return weight, torch.exp2(exponent if power_of_two else exponent + torch.rand(exponent.shape, generator=generator))


@pytest.mark.parametrize("power_of_two", [True, False], ids=["ue8m0", "float32"])
@pytest.mark.parametrize(
    "shape", [(7, 256, 384), (1, 128, 128), (3, 200, 130), (0, 256, 128), (9, 2048, 192), (70, 1024, 72), (300, 200, 160)], ids=str
)
def test_formula(shape: tuple[int, int, int], power_of_two: bool, generator: torch.Generator, device: torch.device) -> None:
    num_tokens, size, num_out = shape
    magnitude = (torch.rand(num_tokens, 1, generator=generator) * 30 - 18).exp2()
    x = (torch.randn(num_tokens, size, generator=generator) * magnitude).bfloat16()
    weight, weight_sf = make_weight(num_out, size, generator, power_of_two)
    out = ops.fp8_linear(x.to(device), weight.to(device), weight_sf.to(device))
    assert out.dtype == torch.bfloat16
    assert_matches(out, quantise(x) @ widen(weight, weight_sf).T)


def test_out_dtype_and_quantisation_matter(generator: torch.Generator, device: torch.device) -> None:
    x = torch.randn(9, 256, generator=generator).bfloat16()
    weight, weight_sf = make_weight(128, 256, generator, True)
    out = ops.fp8_linear(x.to(device), weight.to(device), weight_sf.to(device), out_dtype=torch.float32)
    assert out.dtype == torch.float32
    unquantised = x.double() @ widen(weight, weight_sf).T
    assert 0.005 < (out.cpu().double() - unquantised).norm() / unquantised.norm() < 0.05


def test_does_not_depend_on_the_batch(generator: torch.Generator, device: torch.device) -> None:
    x = torch.randn(65, 200, generator=generator).bfloat16().to(device)
    weight, weight_sf = (tensor.to(device) for tensor in make_weight(130, 200, generator, False))
    assert_independent_of_batch(lambda rows: ops.fp8_linear(x[rows], weight, weight_sf), 65)


@pytest.mark.parametrize("shape", [(1, 512, 200), (9, 2048, 192), (70, 200, 72), (300, 200, 160)], ids=str)
def test_without_fp8_hardware(shape: tuple[int, int, int], generator: torch.Generator, device: torch.device) -> None:
    """As on the oldest GPUs, which convert FP8 by integer arithmetic and multiply float16."""
    num_tokens, size, num_out = shape
    x = torch.randn(num_tokens, size, generator=generator).bfloat16()
    weight, weight_sf = make_weight(num_out, size, generator, False)
    with assume_capability((8, 0)):
        out = ops.fp8_linear(x.to(device), weight.to(device), weight_sf.to(device))
    assert_matches(out, quantise(x) @ widen(weight, weight_sf).T)
