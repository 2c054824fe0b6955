"""``vllm-dsv4 verify``: its comparison on made-up numbers, and whole runs on tiny checkpoints, one of them with a wrong weight."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.checkpoint.writer import write_checkpoint
from vllm_dsv4.cli.comparison import ServedText, compare
from vllm_dsv4.cli.main import main

DENSE = torch.tensor(
    [
        [-1.0, -2.0, -3.0, -4.0],  # of position 1
        [-4.0, -3.0, -1.5, -2.0],
        [-2.5, -1.25, -4.0, -3.0],
        [-3.0, -0.75, -2.0, -0.5],  # of position 4
    ]
)
# The prompt is 0 1; the rest is what DENSE finds likeliest.
AGREEING = ServedText(
    prompt=[0, 1], completion=[2, 1, 3], log_probs=[{1: -2.0, 0: -1.0}, {2: -1.5, 3: -2.0}, {1: -1.25, 0: -2.5}, {3: -0.5, 1: -0.75}]
)


def _with(position: int, reported: dict[int, float], completion: list[int] | None = None) -> ServedText:
    log_probs = list(AGREEING.log_probs)
    log_probs[position - 1] = reported
    return replace(AGREEING, log_probs=log_probs, completion=completion or AGREEING.completion)


def test_equal_numbers_agree_at_no_tolerance():
    comparison = compare([AGREEING, AGREEING], [DENSE, DENSE])
    assert (comparison.num_prompts, comparison.num_values) == (2, 16)
    assert comparison.largest.size == 0.0
    assert comparison.divergences == []
    assert comparison.agrees(0.0)


@pytest.mark.parametrize("position", [1, 2, 4])
@pytest.mark.parametrize("own", [True, False])
def test_the_largest_difference_is_found_where_it_is(position, own):
    """In the prompt, at its end and in the completion; of the text's own token and of another."""
    token, other = sorted(AGREEING.log_probs[position - 1], key=lambda token: (token == AGREEING.sequence[position]) != own)
    value = DENSE[position - 1, token].item()
    changed = _with(position, {token: value + 0.25, other: DENSE[position - 1, other].item() - 0.125})
    comparison = compare([AGREEING, changed], [DENSE, DENSE])
    largest = comparison.largest
    assert (largest.prompt, largest.position, largest.token) == (1, position, token)
    assert (largest.size, largest.served, largest.dense) == (0.25, value + 0.25, value)
    assert comparison.agrees(0.25)
    assert not comparison.agrees(0.2499)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_never_agree(value):
    for position in (1, 4):
        token = AGREEING.sequence[position]
        comparison = compare([_with(position, {token: value})], [DENSE])
        assert comparison.largest.position == position
        assert comparison.largest.size == math.inf
        assert not comparison.agrees(1e9)


def test_nan_in_the_dense_model_never_agrees():
    dense = DENSE.clone()
    dense[2, 1] = math.nan
    assert not compare([AGREEING], [dense]).agrees(1e9)


def test_impossible_tokens_agree_where_both_find_them_so():
    dense = DENSE.clone()
    dense[0, 3] = -math.inf
    assert compare([_with(1, {1: -2.0, 3: -math.inf})], [dense]).agrees(0.0)


def test_the_first_token_that_differs_is_reported():
    """Position 3 is where the texts part; that position 4 differs too is a consequence."""
    text = _with(3, {0: -2.5}, completion=[2, 0, 2])
    text = replace(text, log_probs=[*text.log_probs[:3], {2: -2.0}])
    [divergence] = compare([text], [DENSE]).divergences
    assert (divergence.prompt, divergence.position) == (0, 3)
    assert (divergence.served_token, divergence.dense_token) == (0, 1)
    assert divergence.margin == divergence.top2_gap == 1.25
    [third_best] = compare([_with(3, {3: -3.0}, completion=[2, 3, 3])], [DENSE]).divergences
    assert (third_best.margin, third_best.top2_gap) == (1.75, 1.25)


def test_a_choice_that_the_tolerance_cannot_explain_does_not_agree():
    """Both texts agree in every reported number, but the engine chose a token that cannot have been its likeliest."""
    comparison = compare([_with(4, {1: -0.75}, completion=[2, 1, 1])], [DENSE])
    assert comparison.largest.size == 0.0
    assert comparison.divergences[0].margin == 0.25
    assert not comparison.agrees(0.1)
    assert comparison.agrees(0.125)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (replace(AGREEING, log_probs=AGREEING.log_probs[:-1]), "of 3 positions of prompt 0, not of 4"),
        (_with(2, {3: -2.0}), "no log-probability for token 2 at position 2 of prompt 0"),
    ],
)
def test_missing_numbers_are_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        compare([text], [DENSE])


def test_nothing_to_compare_is_an_error():
    with pytest.raises(ValueError, match="no log-probabilities to compare"):
        compare([], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "0"], "--prompts must be at least 1, got 0"),
        (["--prompt-tokens", "0"], "--prompt-tokens must be at least 1, got 0"),
        (["--new-tokens", "-3"], "--new-tokens must be at least 1, got -3"),
        (["--tolerance", "-1"], "--tolerance must not be negative"),
        (["--tolerance", "nan"], "--tolerance must not be negative"),
        (["--prompt-tokens", "8192"], "make 8212, the model has 8192 positions"),
    ],
)
def test_bad_arguments(tmp_path, capsys, arguments, message):
    write_checkpoint(tmp_path, preset_config("tiny", num_hidden_layers=1), include_draft=False)
    assert main(["verify", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_checkpoint(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "absent")]) == 2
    assert "has no config.json" in capsys.readouterr().err


# Runs the command; with the name of a weight as first argument, the dense model gets that one wrong, the engine does not.
_RUN = """
import sys
from vllm_dsv4.cli.main import main
from vllm_dsv4.reference.dense_weights import DenseWeights
read = DenseWeights.read.__func__
def read_wrong(cls, *args):
    weights = read(cls, *args)
    weights[sys.argv[1]].mul_(1.02)
    return weights
if sys.argv[1]:
    DenseWeights.read = classmethod(read_wrong)
sys.exit(main(["verify", *sys.argv[2:]]))
"""


def _verify(*arguments: str, wrong_weight: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _RUN, wrong_weight, *arguments], capture_output=True, text=True, timeout=600)


needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("indexer", ["auto", "mxfp4"])
def test_a_served_checkpoint_agrees(tmp_path, indexer):
    """A quantised checkpoint with a tokenizer: the text prompt comes beside the random ones."""
    write_checkpoint(tmp_path, preset_config("tiny"), seed=5)
    result = _verify(str(tmp_path), "--prompts", "2", "--prompt-tokens", "150", "--new-tokens", "8", "--indexer", indexer, "--json")
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads(result.stdout)
    assert report["agrees"] and report["greedy_text_agrees"]
    assert report["num_prompts"] == 3
    # Each position of the two prompts but the first, and of what follows: five tokens at least.
    assert report["num_log_probs"] >= 2 * (150 + 8 - 1) * 5
    assert report["largest_difference"]["nats"] <= 1e-5


@needs_vllm
@pytest.mark.slow
def test_an_unquantised_float32_checkpoint_agrees(tmp_path):
    """Too small a vocabulary for a tokenizer, so random prompts only; vLLM's own choice of dtype would be bfloat16."""
    write_checkpoint(tmp_path, preset_config("tiny", quantized=False, dtype="float32", vocab_size=200))
    result = _verify(str(tmp_path), "--prompts", "1", "--prompt-tokens", "140", "--new-tokens", "8")
    assert result.returncode == 0, result.stderr[-4000:]
    assert "agree within 0.0001" in result.stdout
    assert "of 1 prompts" in result.stdout


@needs_vllm
@pytest.mark.slow
def test_another_model_is_not_verified(tmp_path, monkeypatch):
    """Without the plugin vLLM would serve the model that it has itself."""
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    write_checkpoint(tmp_path, preset_config("tiny", num_hidden_layers=1), include_draft=False)
    result = _verify(str(tmp_path))
    assert result.returncode == 2
    assert "VLLM_PLUGINS=another leaves the plugin out" in result.stderr


@needs_vllm
@pytest.mark.slow
def test_one_wrong_weight_is_noticed(tmp_path):
    """One norm of one layer, 2 % off in the dense model only."""
    write_checkpoint(tmp_path, preset_config("tiny"), seed=5)
    result = _verify(str(tmp_path), "--prompts", "1", "--prompt-tokens", "60", "--json", wrong_weight="layers.3.attn.kv_norm.weight")
    assert result.returncode == 1, result.stderr[-4000:]
    report = json.loads(result.stdout)
    assert not report["agrees"]
    assert report["largest_difference"]["nats"] > 1e-3
