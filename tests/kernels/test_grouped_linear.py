"""``grouped_linear``: group by group against plain products."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_independent_of_batch, assert_matches

from vllm_dsv4 import ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 2, 192, 64), (1, 8, 256, 33), (0, 2, 64, 16)], ids=str)
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
