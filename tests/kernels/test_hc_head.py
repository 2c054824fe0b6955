"""``hc_head``: against model.md 3.2 in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_matches

from vllm_dsv4 import ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 4, 96), (1, 4, 512), (3, 2, 40)], ids=str)
def test_formula(shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> None:
    num_tokens, m, size = shape
    streams = (torch.randn(shape, generator=generator) * 2).to(dtype)
    fn = torch.randn(m, m * size, generator=generator) * (m * size) ** -0.5
    scale, base = torch.tensor([1.7]), torch.randn(m, generator=generator)
    out = ops.hc_head(*(tensor.to(device) for tensor in (streams, fn, scale, base)), 1e-6, 1e-3)
    rows = []
    for token in streams:
        flat = token.double().reshape(-1)
        norm = 1 / math.sqrt(flat.pow(2).mean().item() + 1e-6)
        pre = [1 / (1 + math.exp(-(scale.item() * (fn[j].double() @ flat).item() * norm + base[j].item()))) + 1e-3 for j in range(m)]
        rows.append(sum(pre[j] * token[j].double() for j in range(m)))
    assert out.dtype == dtype
    assert_matches(out, torch.stack(rows))


def test_no_tokens(device: torch.device) -> None:
    zeros = [torch.zeros(shape, device=device) for shape in ((0, 4, 8), (4, 32), (1,), (4,))]
    assert ops.hc_head(*zeros, 1e-6, 1e-6).shape == (0, 8)
