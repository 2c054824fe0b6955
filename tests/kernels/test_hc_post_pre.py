"""``hc_post_pre``: against model.md 3.1 and 3.2, rounding where three ops would; and against these ops."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_independent_of_batch, assert_matches

from vllm_dsv4 import ops

EPS = {"rms_eps": 1e-6, "hc_eps": 1e-4}
NAMES = ("streams", "x", "post", "comb")


def make_inputs(num_tokens: int, m: int, width: int, generator: torch.Generator, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """All tensors in the op's order."""
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    comb = random(num_tokens, m, m).softmax(-1)
    fn = random((2 + m) * m, m * width) * (m * width) ** -0.5
    block = (
        (random(num_tokens, width) * 2).to(dtype),
        (random(num_tokens, m, width) * 3).to(dtype),
        random(num_tokens, m).sigmoid() * 2,
        comb,
    )
    return *block, fn, random(3).sigmoid() * 2, random((2 + m) * m) * 0.5, (1 + 0.3 * random(width)).to(dtype)


def merge(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """``hc_post`` in float64."""
    return torch.einsum("tj,td->tjd", post.double(), x.double()) + torch.einsum("tij,tid->tjd", comb.double(), streams.double())


def normed_mix(streams, fn, scale, base, norm_weight, iters: int) -> tuple[torch.Tensor, ...]:
    """``hc_pre`` and the norm in float64, with the rounding between them; the results themselves are not rounded."""
    dtype, m = streams.dtype, streams.shape[1]
    streams, fn, scale, base = (tensor.double() for tensor in (streams, fn, scale, base))
    u = torch.einsum("tjd,njd->tn", streams, fn.unflatten(1, (m, -1))) / (streams.pow(2).mean((1, 2)) + EPS["rms_eps"]).sqrt()[:, None]
    pre, post, logits = (a * part + b for a, part, b in zip(scale, u.split((m, m, m * m), 1), base.split((m, m, m * m)), strict=True))
    comb = logits.unflatten(1, (m, m)).exp()
    comb = comb / comb.sum(2, keepdim=True) + EPS["hc_eps"]
    for step in range(2 * iters - 1):
        comb = comb / (comb.sum(1 + step % 2, keepdim=True) + EPS["hc_eps"])
    x = torch.einsum("tj,tjd->td", 1 / (1 + (-pre).exp()) + EPS["hc_eps"], streams).to(dtype).double()
    x = x / (x.pow(2).mean(1, keepdim=True) + EPS["rms_eps"]).sqrt() * norm_weight.double()
    return x, 2 / (1 + (-post).exp()), comb


# One token, few, some and many are different kernels or tiles; 16384 products a row are what the model has.
SHAPES = [(5, 4, 96), (1, 4, 256), (3, 2, 40), (70, 4, 64)]
GPU_SHAPES = [(1, 4, 4096), (33, 4, 4096), (300, 4, 4096), (1050, 4, 4096)]


@pytest.mark.parametrize("iters", [1, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES + GPU_SHAPES * torch.cuda.is_available(), ids=str)
def test_formula(shape: tuple[int, int, int], dtype: torch.dtype, iters: int, generator: torch.Generator, device: torch.device) -> None:
    inputs = make_inputs(*shape, generator, dtype)
    streams, *outs = ops.hc_post_pre(*(tensor.to(device) for tensor in inputs), *EPS.values(), iters)
    assert [out.dtype for out in (streams, *outs)] == [dtype, dtype, torch.float32, torch.float32]
    assert_matches(streams, merge(*inputs[:4]))
    # From the streams as the op has rounded them: a kernel may fall on the other side of a tie.
    for out, exact in zip(outs, normed_mix(streams.cpu(), *inputs[4:], iters), strict=True):
        assert_matches(out, exact)


def test_equals_the_three_ops(generator: torch.Generator, device: torch.device) -> None:
    inputs = [tensor.to(device) for tensor in make_inputs(9, 4, 128, generator, torch.float32)]
    fused = ops.hc_post_pre(*inputs, *EPS.values(), 20)
    streams = ops.hc_post(*inputs[:4])
    x, post, comb = ops.hc_pre(streams, *inputs[4:7], *EPS.values(), 20)
    for out, expected in zip(fused, (streams, ops.rms_norm(x, inputs[7], EPS["rms_eps"]), post, comb), strict=True):
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_columns_of_a_merged_product(generator: torch.Generator, device: torch.device) -> None:
    """The block's output is a column slice, and the streams lie in longer rows."""
    x, streams, *others = (tensor.to(device) for tensor in make_inputs(19, 4, 64, generator, torch.bfloat16))
    wide_x, wide_streams = torch.cat((x, x + 1), 1), torch.cat((streams, streams + 1), 2)
    plain = ops.hc_post_pre(x, streams, *others, *EPS.values(), 2)
    sliced = ops.hc_post_pre(wide_x[:, :64], wide_streams[..., :64], *others, *EPS.values(), 2)
    assert all(torch.equal(*pair) for pair in zip(plain, sliced, strict=True))


def test_no_tokens(generator: torch.Generator, device: torch.device) -> None:
    inputs = [tensor.to(device) for tensor in make_inputs(0, 4, 64, generator, torch.bfloat16)]
    assert [tuple(out.shape) for out in ops.hc_post_pre(*inputs, *EPS.values(), 20)] == [(0, 4, 64), (0, 64), (0, 4), (0, 4, 4)]


@pytest.mark.parametrize("output", range(4), ids=NAMES)
def test_does_not_depend_on_the_batch(output: int, generator: torch.Generator, device: torch.device) -> None:
    *block, fn, scale, base, norm_weight = (tensor.to(device) for tensor in make_inputs(65, 4, 96, generator, torch.float32))
    op = lambda rows: ops.hc_post_pre(*(t[rows] for t in block), fn, scale, base, norm_weight, *EPS.values(), 20)[output]  # noqa: E731
    assert_independent_of_batch(op, 65)
