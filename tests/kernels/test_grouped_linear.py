"""``grouped_linear``: group by group against plain products."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_independent_of_batch, assert_matches

from vllm_dsv4 import ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 2, 192, 64), (1, 8, 256, 33), (70, 8, 4096, 1024), (0, 2, 64, 16)], ids=str)
def test_each_group_has_its_matrix(
    shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> None:
    num_tokens, groups, size, rank = shape
    x = torch.randn(num_tokens, groups, size, generator=generator).to(dtype)
    weight = torch.randn(groups, rank, size, generator=generator).to(dtype)
    out = ops.grouped_linear(x.to(device), weight.to(device))
    exact = torch.stack([x[:, group].double() @ weight[group].double().T for group in range(groups)], 1)
    assert out.dtype == dtype
    assert_matches(out, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_does_not_depend_on_the_batch(dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> None:
    x, weight = (torch.randn(shape, generator=generator).to(device, dtype) for shape in ((65, 4, 96), (4, 33, 96)))
    assert_independent_of_batch(lambda rows: ops.grouped_linear(x[rows], weight), 65)


def make_fp8_weight(shape: tuple[int, int, int], generator: torch.Generator, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    groups, rank, size = shape
    weight = (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    exponent = torch.randint(-12, 3, (groups, -(-rank // 128), -(-size // 128)), generator=generator).float()
    return weight, torch.exp2(exponent if power_of_two else exponent + torch.rand(exponent.shape, generator=generator))


def widen(weight: torch.Tensor, weight_sf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = weight.float()
    for group, row, column in torch.cartesian_prod(*(torch.arange(size) for size in weight_sf.shape)).tolist():
        out[group, row * 128 : row * 128 + 128, column * 128 : column * 128 + 128] *= weight_sf[group, row, column]
    return out.to(dtype)


@pytest.mark.parametrize("power_of_two", [True, False], ids=["ue8m0", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 2, 192, 64), (1, 3, 256, 130), (70, 2, 128, 72), (0, 2, 128, 16)], ids=str)
def test_fp8_weights_are_widened(
    shape: tuple[int, int, int, int], dtype: torch.dtype, power_of_two: bool, generator: torch.Generator, device: torch.device
) -> None:
    num_tokens, groups, size, rank = shape
    x = torch.randn(num_tokens, groups, size, generator=generator).to(dtype)
    weight, weight_sf = make_fp8_weight((groups, rank, size), generator, power_of_two)
    out = ops.grouped_linear(x.to(device), weight.to(device), weight_sf.to(device))
    assert out.dtype == dtype
    assert_matches(out, torch.einsum("tgk,grk->tgr", x.double(), widen(weight, weight_sf, dtype).double()))
