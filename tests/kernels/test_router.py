"""``router``: against model.md 4 token by token, and against transformers' routers."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_independent_of_batch, assert_matches

from vllm_dsv4 import ops


def score(logit: float) -> float:
    return math.sqrt(logit if logit > 20 else math.log1p(math.exp(logit)))


def check_weights(weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, scaling: float) -> None:
    scores = torch.tensor(
        [[score(row[e]) for e in chosen] for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True)], dtype=torch.float64
    ).view(weights.shape)
    assert weights.dtype == torch.float32
    assert_matches(weights, scores / scores.sum(-1, keepdim=True) * scaling)


@pytest.mark.parametrize("shape", [(33, 256, 6), (1, 8, 2), (5, 12, 12), (0, 8, 2)], ids=str)
def test_selection_by_score_and_bias(shape: tuple[int, int, int], generator: torch.Generator, device: torch.device) -> None:
    num_tokens, num_experts, topk = shape
    logits = torch.randn(num_tokens, num_experts, generator=generator) * 4
    bias = torch.randn(num_experts, generator=generator)
    weights, ids = ops.router(logits.to(device), topk, 1.5, bias=bias.to(device))
    for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        ranked = sorted(range(num_experts), key=lambda e: -(score(row[e]) + bias[e].item()))
        assert chosen == ranked[:topk]
    assert ids.dtype == torch.int32
    check_weights(weights, ids.cpu(), logits, 1.5)


def test_hash_layer_uses_the_table_and_the_gate(generator: torch.Generator, device: torch.device) -> None:
    logits = torch.randn(9, 16, generator=generator)
    table = torch.randint(0, 16, (50, 3), generator=generator, dtype=torch.int32)
    table[7] = 5  # the same expert three times
    input_ids = torch.tensor([0, 49, 7, 7, 3, 20, 21, 22, 23])
    weights, ids = ops.router(logits.to(device), 3, 2.5, tid2eid=table.to(device), input_ids=input_ids.to(device))
    assert torch.equal(ids.cpu(), table[input_ids])
    check_weights(weights, ids.cpu(), logits, 2.5)


def test_ids_outside_the_table_take_its_nearest_row(device: torch.device) -> None:
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
    ids = ops.router(torch.zeros(3, 4, device=device), 2, 1.0, tid2eid=table, input_ids=torch.tensor([-1, 2, 10**6], device=device))[1]
    assert ids.tolist() == [[0, 1], [2, 3], [2, 3]]


def test_among_equals_the_lower_index_wins(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [3.0] * 5], device=device)
    assert ops.router(logits, 2, 1.0, bias=torch.zeros(5, device=device))[1].tolist() == [[1, 2], [0, 1]]


def test_among_many_equals_the_lower_index_wins(generator: torch.Generator, device: torch.device) -> None:
    """A few levels for 256 experts: nearly every choice is one among equals."""
    logits = torch.randint(-2, 3, (33, 256), generator=generator).float()
    _, ids = ops.router(logits.to(device), 6, 1.5, bias=torch.zeros(256, device=device))
    assert ids.tolist() == [sorted(range(256), key=lambda e, row=row: (-row[e], e))[:6] for row in logits.tolist()]


def test_softplus_of_large_logits(device: torch.device) -> None:
    logits = torch.tensor([[30.0, 1000.0, -1000.0, 19.9]], device=device)
    weights, ids = ops.router(logits, 3, 1.0, bias=torch.zeros(4, device=device))
    assert ids.tolist() == [[1, 0, 3]]
    check_weights(weights, ids.cpu(), logits.cpu(), 1.0)


@pytest.mark.parametrize("logit", [-60.0, -1000.0])
def test_vanishing_scores_give_transformers_weights(logit: float, device: torch.device) -> None:
    """Equal ones while the scores are far above 1e-20, then none; never NaN, which would spread to the whole sequence."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(
        hidden_size=32, num_hidden_layers=2, n_routed_experts=12, num_experts_per_tok=4, routed_scaling_factor=2.5
    )
    module = modeling.DeepseekV4TopKRouter(config).float()
    module.weight.data.fill_(logit / 32)
    with torch.inference_mode():
        _, their_weights, _ = module(torch.ones(1, 32))
    weights, ids = ops.router(torch.full((1, 12), logit, device=device), 4, 2.5, bias=torch.zeros(12, device=device))
    assert ids.tolist() == [[0, 1, 2, 3]]
    torch.testing.assert_close(weights.cpu(), their_weights, atol=1e-5, rtol=1e-5)


def test_transformers(generator: torch.Generator, device: torch.device) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(
        hidden_size=32, num_hidden_layers=2, n_routed_experts=12, num_experts_per_tok=4, routed_scaling_factor=2.5
    )
    module = modeling.DeepseekV4TopKRouter(config).float()
    module.weight.data.copy_(torch.randn(12, 32, generator=generator))
    module.e_score_correction_bias.copy_(torch.randn(12, generator=generator))
    hidden = torch.randn(21, 32, generator=generator)
    with torch.inference_mode():
        _, their_weights, their_ids = module(hidden)
    weights, ids = ops.router((hidden @ module.weight.data.T).to(device), 4, 2.5, bias=module.e_score_correction_bias.to(device))
    order, their_order = ids.cpu().sort(-1), their_ids.sort(-1)
    assert torch.equal(order.values.long(), their_order.values)
    torch.testing.assert_close(weights.cpu().gather(1, order.indices), their_weights.gather(1, their_order.indices), atol=1e-5, rtol=1e-5)


def test_transformers_hash_router(generator: torch.Generator, device: torch.device) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(
        hidden_size=32, vocab_size=40, num_hidden_layers=2, n_routed_experts=12, num_experts_per_tok=4, routed_scaling_factor=2.5
    )
    module = modeling.DeepseekV4HashRouter(config).float()
    module.weight.data.copy_(torch.randn(12, 32, generator=generator))
    module.tid2eid.copy_(torch.randint(0, 12, (40, 4), generator=generator))
    hidden, input_ids = torch.randn(21, 32, generator=generator), torch.randint(0, 40, (21,), generator=generator)
    with torch.inference_mode():
        logits, their_weights, their_ids = module(hidden, input_ids)
    weights, ids = ops.router(logits.to(device), 4, 2.5, tid2eid=module.tid2eid.to(device), input_ids=input_ids.to(device))
    assert torch.equal(ids.cpu().long(), their_ids)
    torch.testing.assert_close(weights.cpu(), their_weights, atol=1e-5, rtol=1e-5)


def test_a_table_needs_input_ids(device: torch.device) -> None:
    with pytest.raises(ValueError, match="input_ids"):
        ops.router(torch.zeros(3, 4, device=device), 2, 1.0, tid2eid=torch.zeros(5, 2, dtype=torch.int32, device=device))


@pytest.mark.parametrize("output", [0, 1], ids=["weights", "ids"])
def test_does_not_depend_on_the_batch(output: int, generator: torch.Generator, device: torch.device) -> None:
    logits, bias = (torch.randn(shape, generator=generator).to(device) for shape in ((65, 256), (256,)))
    assert_independent_of_batch(lambda rows: ops.router(logits[rows], 6, 1.5, bias=bias)[output], 65)
