"""``experts`` for few tokens: cases that ``test_experts.py`` does not have, against the same oracle."""

from __future__ import annotations

import os

import pytest
import torch
from test_experts import LIMIT, make_case
from test_experts_prefill import exact_sum
from tolerances import assert_matches_experts

from vllm_dsv4.kernels._experts_decode import experts_decode
from vllm_dsv4.kernels._launch import assume_capability

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or Triton's interpreter"
)

# Experts, hidden size, intermediate size, experts of a token.
SHAPES = [(6, 256, 128, 3), (3, 128, 256, 2), (4, 384, 640, 1)]


def decode(x, topk_weights, topk_ids, w13, w2, device: torch.device, expert_map: torch.Tensor | None = None) -> torch.Tensor:
    move = lambda tensor: None if tensor is None else tensor.to(device)  # noqa: E731
    tensors = (move(t) for t in (x, topk_weights, topk_ids, w13[0], w2[0], w13[1], w2[1]))
    return experts_decode(*tensors, LIMIT, move(expert_map))


@pytest.mark.parametrize("num_tokens", [1, 23])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_formula(num_tokens: int, sizes: tuple[int, int, int, int], generator: torch.Generator, device: torch.device) -> None:
    if num_tokens == 1 and device.type == "cpu":
        pytest.skip("the interpreter's bfloat16, rounded towards zero, is too far off for so few numbers")
    x, topk_weights, topk_ids, w13, w2 = make_case("mxfp4", generator, num_tokens=num_tokens, sizes=sizes)
    topk_ids[4:5] = topk_ids[4:5, :1]  # the same expert many times
    topk_ids[5:9, -1] = -1
    topk_ids[9:10] = -1
    out = decode(x, topk_weights, topk_ids, w13, w2, device)
    assert_matches_experts(out, exact_sum(x, topk_weights, topk_ids, w13, w2, "mxfp4"))
    assert not out[9:10].any()


@pytest.mark.parametrize("num_tokens", [0, 2, 65, 128])
def test_any_number_of_tokens(num_tokens: int, generator: torch.Generator, device: torch.device) -> None:
    """Few pairs an expert take one tile; many take several."""
    *tokens, w13, w2 = make_case("mxfp4", generator, num_tokens=128, sizes=(3, 128, 128, 2))
    x, topk_weights, topk_ids = (tensor[:num_tokens] for tensor in tokens)
    out = decode(x, topk_weights, topk_ids, w13, w2, device)
    assert_matches_experts(out, exact_sum(x, topk_weights, topk_ids, w13, w2, "mxfp4"))


def test_experts_of_other_ranks_are_left_out(generator: torch.Generator, device: torch.device) -> None:
    x, topk_weights, topk_ids, w13, w2 = make_case("mxfp4", generator)
    expert_map = torch.tensor([-1, 2, -1, 0, 1, -1], dtype=torch.int32)
    topk_ids[3, 0] = -1
    local = [3, 4, 1]
    w13_part, w2_part = (tuple(t[local] for t in weights) for weights in (w13, w2))
    out = decode(x, topk_weights, topk_ids, w13_part, w2_part, device, expert_map)
    here = torch.where(torch.isin(topk_ids, torch.tensor([1, 3, 4])), topk_ids, -1)
    assert_matches_experts(out, exact_sum(x, topk_weights, here, w13, w2, "mxfp4"))


def test_strided_tokens(generator: torch.Generator, device: torch.device) -> None:
    x, *rest = make_case("mxfp4", generator)
    wide = torch.randn(len(x), 600, generator=generator).bfloat16().to(device)
    wide[:, 300:556] = x.to(device)
    assert_matches_experts(decode(wide[:, 300:556], *rest, device), exact_sum(x, *rest, "mxfp4"))


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_every_generation_of_tensor_cores(num_tokens: int, generator: torch.Generator, device: torch.device) -> None:
    """Operand layouts and conversions are those of the assumed GPU; that of this one computes the sums."""
    if device.type == "cpu":
        pytest.skip("the interpreter has no tensor cores")
    case = make_case("mxfp4", generator, num_tokens=num_tokens, sizes=(6, 512, 256, 3))
    exact = exact_sum(*case, "mxfp4")
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):
        with assume_capability(capability):
            assert_matches_experts(decode(*case, device), exact)


def test_runs_are_identical(generator: torch.Generator, device: torch.device) -> None:
    """Also where many programs of one expert wait for each other."""
    case = make_case("mxfp4", generator, num_tokens=70, sizes=(6, 512, 512, 3))
    first = decode(*case, device)
    assert all(torch.equal(first, decode(*case, device)) for _ in range(8))
