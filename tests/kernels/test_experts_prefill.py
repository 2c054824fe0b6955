"""``experts`` for many tokens: the kernels behind it at any number of tokens, against the same oracle as ``test_experts.py``."""

from __future__ import annotations

import os

import pytest
import torch
from test_experts import LIMIT, expert_output, make_case

from vllm_dsv4.kernels._experts_prefill import experts_prefill
from vllm_dsv4.kernels._launch import assume_capability

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or Triton's interpreter"
)


def exact_sum(x, topk_weights, topk_ids, w13, w2, format: str) -> torch.Tensor:
    """Σ over each token's experts; -1 gives nothing."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, ids in enumerate(topk_ids.tolist()):
        for choice, expert in enumerate(ids):
            if expert >= 0:
                out[token] += expert_output(x[token], topk_weights[token, choice].item(), w13[2][expert], w2[2][expert], format)
    return out


def prefill(x, topk_weights, topk_ids, w13, w2, device: torch.device, expert_map: torch.Tensor | None = None) -> torch.Tensor:
    move = lambda tensor: None if tensor is None else tensor.to(device)  # noqa: E731
    tensors = (move(t) for t in (x, topk_weights, topk_ids, w13[0], w2[0], w13[1], w2[1]))
    return experts_prefill(*tensors, LIMIT, move(expert_map))


def assert_close(out: torch.Tensor, exact: torch.Tensor) -> None:
    assert out.dtype == torch.float32 and out.shape == exact.shape
    bound = 4e-3 if out.is_cuda else 5e-2  # Triton's interpreter rounds to bfloat16 towards zero
    assert (out.cpu().double() - exact).norm() <= bound * exact.norm()


# Experts, hidden size, intermediate size, experts of a token.
SHAPES = [(6, 256, 128, 3), (3, 128, 256, 2), (5, 160, 96, 4), (4, 384, 416, 1)]


@pytest.mark.parametrize("format", ["mxfp4", "fp8", "plain"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_formula(format: str, sizes: tuple[int, int, int, int], generator: torch.Generator, device: torch.device) -> None:
    x, topk_weights, topk_ids, w13, w2 = make_case(format, generator, num_tokens=23, sizes=sizes)
    topk_ids[4] = topk_ids[4, 0]  # the same expert many times
    topk_ids[5:9, -1] = -1
    topk_ids[9] = -1
    out = prefill(x, topk_weights, topk_ids, w13, w2, device)
    assert_close(out, exact_sum(x, topk_weights, topk_ids, w13, w2, format))
    assert not out[9].any()


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 65, 300])
def test_any_number_of_tokens(num_tokens: int, generator: torch.Generator, device: torch.device) -> None:
    """Few pairs an expert take small tiles; many take several tiles."""
    *tokens, w13, w2 = make_case("mxfp4", generator, num_tokens=300, sizes=(3, 128, 128, 2))
    x, topk_weights, topk_ids = (tensor[:num_tokens] for tensor in tokens)
    assert_close(prefill(x, topk_weights, topk_ids, w13, w2, device), exact_sum(x, topk_weights, topk_ids, w13, w2, "mxfp4"))


@pytest.mark.parametrize("format", ["mxfp4", "fp8"])
def test_without_fp8_hardware_the_bits_are_the_same(format: str, generator: torch.Generator, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("no FP8 hardware to compare with")
    case = make_case(format, generator, num_tokens=33)
    hardware = prefill(*case, device)
    with assume_capability((8, 0)):
        software = prefill(*case, device)
    assert_close(software, hardware.cpu().double())


@pytest.mark.parametrize("format", ["mxfp4", "fp8", "plain"])
def test_experts_of_other_ranks_are_left_out(format: str, generator: torch.Generator, device: torch.device) -> None:
    x, topk_weights, topk_ids, w13, w2 = make_case(format, generator)
    expert_map = torch.tensor([-1, 2, -1, 0, 1, -1], dtype=torch.int32)
    topk_ids[3, 0] = -1
    local = [3, 4, 1]
    w13_part, w2_part = (tuple(None if t is None else t[local] for t in weights) for weights in (w13, w2))
    out = prefill(x, topk_weights, topk_ids, w13_part, w2_part, device, expert_map)
    here = torch.where(torch.isin(topk_ids, torch.tensor([1, 3, 4])), topk_ids, -1)
    assert_close(out, exact_sum(x, topk_weights, here, w13, w2, format))


def test_nothing_to_do_gives_zeros(generator: torch.Generator, device: torch.device) -> None:
    case = make_case("mxfp4", generator)
    assert not prefill(*case, device, torch.full((6,), -1, dtype=torch.int32)).any()


def test_one_expert_has_all_tokens(generator: torch.Generator, device: torch.device) -> None:
    x, topk_weights, topk_ids, w13, w2 = make_case("mxfp4", generator, num_tokens=40)
    topk_ids[:] = torch.tensor([5, -1, 5], dtype=torch.int32)
    assert_close(prefill(x, topk_weights, topk_ids, w13, w2, device), exact_sum(x, topk_weights, topk_ids, w13, w2, "mxfp4"))


def test_strided_tokens(generator: torch.Generator, device: torch.device) -> None:
    x, *rest = make_case("plain", generator)
    wide = torch.randn(len(x), 600, generator=generator).bfloat16().to(device)
    wide[:, 300:556] = x.to(device)
    strided = wide[:, 300:556]
    assert_close(prefill(strided, *rest, device), exact_sum(x, *rest, "plain"))


def test_scales_far_from_one(generator: torch.Generator, device: torch.device) -> None:
    """Weights of about 2^40 and 2^-50: bfloat16 holds them, and their products with the activations cancel out."""
    x, topk_weights, topk_ids, w13, w2 = make_case("mxfp4", generator)
    w13 = (w13[0], w13[1] - 30, w13[2] * 2.0**-30)
    w2 = (w2[0], w2[1] + 40, w2[2] * 2.0**40)
    x = (x.float() * 2.0**20).bfloat16()
    assert_close(prefill(x, topk_weights, topk_ids, w13, w2, device), exact_sum(x, topk_weights, topk_ids, w13, w2, "mxfp4"))


def test_float32_activations_and_weights(generator: torch.Generator, device: torch.device) -> None:
    num_experts, hidden_size, intermediate = 5, 64, 48
    shapes = ((num_experts, 2 * intermediate, hidden_size), (num_experts, hidden_size, intermediate))
    w13, w2 = (torch.randn(shape, generator=generator) * 0.3 for shape in shapes)
    x, topk_weights = torch.randn(7, hidden_size, generator=generator), torch.rand(7, 2, generator=generator)
    topk_ids = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(7)]).int()
    out = prefill(x, topk_weights, topk_ids, (w13, None), (w2, None), device)
    exact = torch.zeros(7, hidden_size, dtype=torch.float64)
    for token, ids in enumerate(topk_ids.tolist()):
        for choice, expert in enumerate(ids):
            gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            exact[token] += w2[expert].double() @ (gate / (1 + (-gate).exp()) * up * topk_weights[token, choice].double())
    torch.testing.assert_close(out.cpu().double(), exact, atol=1e-5, rtol=1e-5)


def test_runs_are_identical(generator: torch.Generator, device: torch.device) -> None:
    case = make_case("mxfp4", generator, num_tokens=70)
    first = prefill(*case, device)
    assert all(torch.equal(first, prefill(*case, device)) for _ in range(2))
