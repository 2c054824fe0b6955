"""``linear``: against dot products in float64, one at a time."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_independent_of_batch, assert_matches

from vllm_dsv4 import ops


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(7, 300, 129), (1, 64, 5), (0, 64, 5)], ids=str)
def test_dot_products(
    shape: tuple[int, int, int], dtype: torch.dtype, out_dtype: torch.dtype | None, generator: torch.Generator, device: torch.device
) -> None:
    num_tokens, size, num_out = shape
    x = torch.randn(num_tokens, size, generator=generator).to(dtype)
    weight = torch.randn(num_out, size, generator=generator).to(dtype)
    out = ops.linear(x.to(device), weight.to(device), out_dtype=out_dtype)
    assert out.dtype == (out_dtype or dtype)
    assert_matches(out, (x.double().unsqueeze(1) * weight.double()).sum(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_does_not_depend_on_the_batch(dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> None:
    x, weight = (torch.randn(shape, generator=generator).to(device, dtype) for shape in ((65, 300), (129, 300)))
    assert_independent_of_batch(lambda rows: ops.linear(x[rows], weight), 65)
