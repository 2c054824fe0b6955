"""``hc_head``: against model.md 3.2 in plain Python, and against transformers' module."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_independent_of_batch, assert_matches

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


def test_does_not_depend_on_the_batch(generator: torch.Generator, device: torch.device) -> None:
    streams, fn, base = (torch.randn(shape, generator=generator).to(device) for shape in ((65, 4, 96), (4, 384), (4,)))
    scale = torch.ones(1, device=device)
    assert_independent_of_batch(lambda rows: ops.hc_head(streams[rows], fn, scale, base, 1e-6, 1e-6), 65)


def test_transformers(generator: torch.Generator, device: torch.device) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(hidden_size=64, num_hidden_layers=2, hc_eps=1e-3, rms_norm_eps=1e-5)
    module = modeling.DeepseekV4HyperHead(config).float()
    streams = torch.randn(11, 4, 64, generator=generator)
    fn, scale, base = (torch.randn(shape, generator=generator) for shape in ((4, 256), (1,), (4,)))
    for parameter, value in ((module.hc_fn, fn), (module.hc_scale, scale), (module.hc_base, base)):
        parameter.data.copy_(value)
    with torch.inference_mode():
        theirs = module(streams.unsqueeze(0))[0]
    ours = ops.hc_head(*(tensor.to(device) for tensor in (streams, fn, scale, base)), 1e-5, 1e-3)
    torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-5)
