"""``experts``: token by token and expert by expert against model.md 4 and 5.1, and against transformers' experts."""

from __future__ import annotations

import pytest
import torch
from test_fp8_linear import quantise, widen
from tolerances import assert_independent_of_batch, assert_matches_experts

from vllm_dsv4 import ops

MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
LIMIT = 2.0  # low enough to clamp often


def make_weights(format: str, shape: tuple[int, int, int], generator: torch.Generator):
    """One stack of weights → (stored, scales or None, values [E, N, K] float64)."""
    num_experts, rows, columns = shape
    if format == "plain":
        weight = (torch.randn(shape, generator=generator) * columns**-0.5).bfloat16()
        return weight, None, weight.double()
    if format == "fp8":
        weight = (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        sf = torch.rand(num_experts, -(-rows // 128), -(-columns // 128), generator=generator) * 0.01 * columns**-0.5
        return weight, sf, torch.stack([widen(w, s) for w, s in zip(weight, sf, strict=True)])
    packed = torch.randint(0, 256, (num_experts, rows, columns // 2), generator=generator, dtype=torch.uint8)
    sf = torch.randint(117, 124, (num_experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
    code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()  # the even column is the low nibble
    values = torch.where(code >= 8, -1.0, 1.0).double() * MAGNITUDES[code % 8]
    return packed, sf, values * torch.exp2(sf.double() - 127).repeat_interleave(32, -1)


def activations(x: torch.Tensor, format: str) -> torch.Tensor:
    return x.double() if format == "plain" else quantise(x)


def expert_output(x: torch.Tensor, weight: float, w13: torch.Tensor, w2: torch.Tensor, format: str) -> torch.Tensor:
    """One expert's output for one token x [D], rounded where the official code rounds."""
    wide = activations(x.unsqueeze(0), format)[0]
    gate, up = (w13 @ wide).bfloat16().double().chunk(2)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    hidden = (gate / (1 + (-gate).exp()) * up * weight).bfloat16()
    return (w2 @ activations(hidden.unsqueeze(0), format)[0]).bfloat16().double()


def make_case(format: str, generator: torch.Generator, num_tokens: int = 9, sizes: tuple[int, int, int, int] = (6, 256, 128, 3)):
    num_experts, hidden, intermediate, topk = sizes
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    topk_ids = torch.stack([torch.randperm(num_experts, generator=generator)[:topk] for _ in range(num_tokens)]).int()
    topk_weights = torch.rand(num_tokens, topk, generator=generator)
    return (
        x,
        topk_weights,
        topk_ids,
        make_weights(format, (num_experts, 2 * intermediate, hidden), generator),
        make_weights(format, (num_experts, hidden, intermediate), generator),
    )


def run(x, topk_weights, topk_ids, w13, w2, device, **options):
    move = lambda tensor: None if tensor is None else tensor.to(device)  # noqa: E731
    return ops.experts(
        *(move(t) for t in (x, topk_weights, topk_ids, w13[0], w2[0])),
        w13_sf=move(w13[1]),
        w2_sf=move(w2[1]),
        swiglu_limit=LIMIT,
        **options,
    )


@pytest.mark.parametrize("format", ["mxfp4", "fp8", "plain"])
def test_formula(format: str, generator: torch.Generator, device: torch.device) -> None:
    x, topk_weights, topk_ids, w13, w2 = make_case(format, generator)
    topk_ids[4] = topk_ids[4, 0]  # the same expert three times is three contributions
    out = run(x, topk_weights, topk_ids, w13, w2, device)
    exact = torch.stack(
        [
            sum(expert_output(x[t], topk_weights[t, k].item(), w13[2][e], w2[2][e], format) for k, e in enumerate(topk_ids[t].tolist()))
            for t in range(len(x))
        ]
    )
    assert out.dtype in (torch.float32, torch.float64)
    assert_matches_experts(out, exact)


@pytest.mark.parametrize("format", ["mxfp4", "plain"])
def test_experts_of_other_ranks_are_left_out(format: str, generator: torch.Generator, device: torch.device) -> None:
    """The shares of two ranks with three experts each add up to the whole."""
    x, topk_weights, topk_ids, w13, w2 = make_case(format, generator)
    whole = run(x, topk_weights, topk_ids, w13, w2, device)
    shares = []
    for local in (slice(0, 3), slice(3, 6)):
        expert_map = torch.full((6,), -1, dtype=torch.int32)
        expert_map[local] = torch.arange(3, dtype=torch.int32)
        w13_part, w2_part = (tuple(None if t is None else t[local] for t in weights) for weights in (w13, w2))
        shares.append(run(x, topk_weights, topk_ids, w13_part, w2_part, device, expert_map=expert_map.to(device)))
    torch.testing.assert_close(shares[0] + shares[1], whole, rtol=1e-6, atol=1e-6)
    assert not torch.equal(shares[0], whole)


@pytest.mark.parametrize("format", ["mxfp4", "fp8", "plain"])
def test_slices_of_experts(format: str, generator: torch.Generator) -> None:
    """Two ranks with half of every expert's intermediate size: summed before rounding, bit for bit the unsharded result."""
    sizes = (4, 128, 256, 2)
    x, topk_weights, topk_ids, w13, w2 = make_case(format, generator, sizes=sizes)
    cpu = torch.device("cpu")
    whole = run(x, topk_weights, topk_ids, w13, w2, cpu)

    def half(rank: int) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, ...]]:
        rows = lambda t: None if t is None else torch.cat([part.chunk(2, 1)[rank] for part in t.chunk(2, 1)], 1)  # noqa: E731
        columns = lambda t: None if t is None else t.chunk(2, -1)[rank].contiguous()  # noqa: E731
        return tuple(rows(t) for t in w13), tuple(columns(t) for t in w2)

    partials: list[torch.Tensor] = []
    run(x, topk_weights, topk_ids, *half(0), cpu, sum_slices=lambda y: partials.append(y) or y)
    other = iter(partials)
    summed = run(x, topk_weights, topk_ids, *half(1), cpu, sum_slices=lambda y: y + next(other))
    assert torch.equal(summed, whole)


def test_no_tokens_and_one_token(generator: torch.Generator, device: torch.device) -> None:
    case = make_case("mxfp4", generator)
    x, topk_weights, topk_ids, w13, w2 = case
    assert run(x[:0], topk_weights[:0], topk_ids[:0], w13, w2, device).shape == (0, 256)
    whole, alone = run(*case, device), run(x[3:4], topk_weights[3:4], topk_ids[3:4], w13, w2, device)
    torch.testing.assert_close(alone[0], whole[3], rtol=0 if device.type == "cpu" else 1e-5, atol=0 if device.type == "cpu" else 1e-5)


def test_transformers(generator: torch.Generator, device: torch.device) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(
        hidden_size=64, moe_intermediate_size=48, num_hidden_layers=2, n_routed_experts=5, num_experts_per_tok=2, swiglu_limit=LIMIT
    )
    config._attn_implementation = config._experts_implementation = "eager"
    module = modeling.DeepseekV4Experts(config).float()
    w13, w2 = torch.randn(5, 96, 64, generator=generator) * 0.3, torch.randn(5, 64, 48, generator=generator) * 0.3
    module.gate_up_proj.data.copy_(w13)
    module.down_proj.data.copy_(w2)
    x, topk_weights = torch.randn(7, 64, generator=generator), torch.rand(7, 2, generator=generator)
    topk_ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(7)])
    with torch.inference_mode():
        theirs = module(x, topk_ids, topk_weights)
    ours = run(x, topk_weights, topk_ids.int(), (w13, None), (w2, None), device)
    torch.testing.assert_close(ours.cpu().float(), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("format", ["mxfp4", "fp8", "plain"])
def test_a_rank_without_the_chosen_experts_gives_zeros(format: str, generator: torch.Generator, device: torch.device) -> None:
    x, topk_weights, topk_ids, w13, w2 = make_case(format, generator)
    nowhere = torch.full((6,), -1, dtype=torch.int32, device=device)
    out = run(x, topk_weights, topk_ids, w13, w2, device, expert_map=nowhere)
    assert out.shape == x.shape and not out.any()


@pytest.mark.parametrize("mapped", [False, True])
def test_absent_ids_are_left_out(mapped: bool, generator: torch.Generator, device: torch.device) -> None:
    x, topk_weights, topk_ids, w13, w2 = make_case("plain", generator)
    options = {"expert_map": torch.arange(6, dtype=torch.int32, device=device)} if mapped else {}
    topk_ids[:, 1:] = -1
    topk_ids[4] = -1
    out = run(x, topk_weights, topk_ids, w13, w2, device, **options)
    first = run(x, topk_weights[:, :1], topk_ids[:, :1], w13, w2, device, **options)
    assert torch.equal(out, first) and not out[4].any() and out[3].any()


@pytest.mark.parametrize("format", ["mxfp4", "fp8", "plain"])
def test_does_not_depend_on_the_batch(format: str, generator: torch.Generator, device: torch.device) -> None:
    x, topk_weights, topk_ids, w13, w2 = make_case(format, generator, num_tokens=33)
    assert_independent_of_batch(lambda rows: run(x[rows], topk_weights[rows], topk_ids[rows], w13, w2, device), 33)
