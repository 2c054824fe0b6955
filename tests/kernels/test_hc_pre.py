"""``hc_pre``: against model.md 3.2 in plain Python, and against transformers' module."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_independent_of_batch, assert_matches

from vllm_dsv4 import ops

EPS = {"rms_eps": 1e-6, "hc_eps": 1e-4}


def make_inputs(num_tokens: int, m: int, size: int, generator: torch.Generator, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    streams = (torch.randn(num_tokens, m, size, generator=generator) * 3).to(dtype)
    fn = torch.randn((2 + m) * m, m * size, generator=generator) * (m * size) ** -0.5
    return streams, fn, torch.rand(3, generator=generator) * 2, torch.randn((2 + m) * m, generator=generator) * 0.5


def by_hand(streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, iters: int) -> tuple[torch.Tensor, ...]:
    """One token: streams [m, D] → x [D], post [m], comb [m, m], in float64."""
    m = streams.shape[0]
    flat = torch.cat([stream.double() for stream in streams])
    norm = 1 / math.sqrt((flat @ flat).item() / len(flat) + EPS["rms_eps"])
    u = [(fn[row].double() @ flat).item() * norm for row in range(len(fn))]
    sigmoid = lambda value: 1 / (1 + math.exp(-value))  # noqa: E731
    a, b = scale.tolist(), base.tolist()
    pre = [sigmoid(a[0] * u[j] + b[j]) + EPS["hc_eps"] for j in range(m)]
    post = [2 * sigmoid(a[1] * u[m + j] + b[m + j]) for j in range(m)]
    comb = [[math.exp(a[2] * u[2 * m + m * i + j] + b[2 * m + m * i + j]) for j in range(m)] for i in range(m)]
    comb = [[value / sum(row) + EPS["hc_eps"] for value in row] for row in comb]

    def columns(c: list[list[float]]) -> list[list[float]]:
        sums = [sum(c[i][j] for i in range(m)) + EPS["hc_eps"] for j in range(m)]
        return [[c[i][j] / sums[j] for j in range(m)] for i in range(m)]

    comb = columns(comb)
    for _ in range(iters - 1):
        comb = columns([[value / (sum(row) + EPS["hc_eps"]) for value in row] for row in comb])
    x = sum(pre[j] * streams[j].double() for j in range(m))
    return x, torch.tensor(post, dtype=torch.float64), torch.tensor(comb, dtype=torch.float64)


@pytest.mark.parametrize("iters", [1, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 4, 96), (1, 4, 256), (3, 2, 40)], ids=str)
def test_formula(shape: tuple[int, int, int], dtype: torch.dtype, iters: int, generator: torch.Generator, device: torch.device) -> None:
    inputs = make_inputs(*shape, generator, dtype)
    x, post, comb = ops.hc_pre(*(tensor.to(device) for tensor in inputs), EPS["rms_eps"], EPS["hc_eps"], iters)
    expected = [by_hand(streams, *inputs[1:], iters) for streams in inputs[0]]
    assert (x.dtype, post.dtype, comb.dtype) == (dtype, torch.float32, torch.float32)
    for out, exact in zip((x, post, comb), zip(*expected, strict=True), strict=True):
        assert_matches(out, torch.stack(exact))


def test_columns_sum_to_one_and_no_tokens(generator: torch.Generator, device: torch.device) -> None:
    inputs = [tensor.to(device) for tensor in make_inputs(40, 4, 64, generator, torch.float32)]
    comb = ops.hc_pre(*inputs, 1e-6, 1e-6, 20)[2].cpu()
    torch.testing.assert_close(comb.sum(1), torch.ones(40, 4), atol=1e-4, rtol=0)
    assert [tuple(out.shape) for out in ops.hc_pre(inputs[0][:0], *inputs[1:], 1e-6, 1e-6, 20)] == [(0, 64), (0, 4), (0, 4, 4)]


def test_transformers(generator: torch.Generator, device: torch.device) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(hidden_size=64, num_hidden_layers=2, hc_eps=1e-4, rms_norm_eps=1e-5, hc_sinkhorn_iters=7)
    module = modeling.DeepseekV4HyperConnection(config).float()
    streams, fn, scale, base = make_inputs(11, 4, 64, generator, torch.float32)
    for parameter, value in ((module.fn, fn), (module.scale, scale), (module.base, base)):
        parameter.data.copy_(value)
    with torch.inference_mode():
        theirs = module(streams.unsqueeze(0))
    ours = ops.hc_pre(*(tensor.to(device) for tensor in (streams, fn, scale, base)), 1e-5, 1e-4, 7)
    by_shape = {tuple(tensor.shape[1:]): tensor[0] for tensor in theirs}
    for out in ours:
        torch.testing.assert_close(out.cpu(), by_shape[tuple(out.shape)], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("output", [0, 1, 2], ids=["x", "post", "comb"])
def test_does_not_depend_on_the_batch(output: int, generator: torch.Generator, device: torch.device) -> None:
    streams, *parameters = (tensor.to(device) for tensor in make_inputs(65, 4, 96, generator, torch.bfloat16))
    assert_independent_of_batch(lambda rows: ops.hc_pre(streams[rows], *parameters, 1e-6, 1e-6, 20)[output], 65)
