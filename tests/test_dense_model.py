"""The dense model against transformers in float32, on named and on random configurations (model.md 8)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from oracle import NAMED_CONFIGS, flash_like, hf_greedy, hf_log_probs, load_hf, random_config, random_prompt, write_oracle_checkpoint

from vllm_dsv4.checkpoint.schema import CheckpointError
from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.checkpoint.writer import write_checkpoint
from vllm_dsv4.config import ConfigError
from vllm_dsv4.reference.model import DenseModel

# float32 sums in transformers against float64 in ours: 3e-6 to 6e-6 over 300 tokens.
TOLERANCE = 2e-5
SMALL = {"vocab_size": 128, "hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 3, "compress_ratios": [4, 128, 0]}
EARLY_YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}


def _differences(folder: Path, prompt: list[int]) -> torch.Tensor:
    """The largest difference of a log-probability at each position."""
    return (DenseModel.from_checkpoint(folder).log_probs(prompt) - hf_log_probs(load_hf(folder), prompt)).abs().amax(-1)


@pytest.mark.parametrize("name", NAMED_CONFIGS)
def test_named_configurations(tmp_path, name):
    config = NAMED_CONFIGS[name]()
    folder = write_oracle_checkpoint(tmp_path, config)
    assert _differences(folder, random_prompt(config["vocab_size"], 300)).max() <= TOLERANCE


@pytest.mark.parametrize("seed", range(10))
def test_random_configurations(tmp_path, seed):
    config = random_config(seed)
    folder = write_oracle_checkpoint(tmp_path, config, seed)
    assert _differences(folder, random_prompt(config["vocab_size"], 300, seed)).max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("selects", [False, True], ids=["all_entries", "selected_entries"])
def test_long_prompt(tmp_path, selects):
    """5,000 tokens: 39 entries of ratio 128, 1,250 of ratio 4, far beyond the context that YaRN starts from."""
    choices = {"index_topk": 32, "num_hash_layers": 1} if selects else {"index_topk": 1250, "num_hash_layers": 3}
    folder = write_oracle_checkpoint(tmp_path, flash_like() | SMALL | choices | {"rope_scaling": EARLY_YARN}, seed=1)
    # With this seed no score at the edge of a selection is within 1e-6 of the next, so float32's error decides nothing.
    assert _differences(folder, random_prompt(SMALL["vocab_size"], 5000)).max() <= TOLERANCE


def test_greedy(tmp_path):
    folder = write_oracle_checkpoint(tmp_path, flash_like() | SMALL)
    prompt = random_prompt(SMALL["vocab_size"], 120)
    tokens, log_probs = DenseModel.from_checkpoint(folder).generate_greedy(prompt, 20)
    expected_tokens, expected = hf_greedy(load_hf(folder), prompt, 20)
    assert tokens == expected_tokens
    torch.testing.assert_close(log_probs, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("indexer_format", ["fp8", "mxfp4"])
def test_prefixes(tmp_path, indexer_format):
    """No token depends on a later one, and a sequence may end anywhere in a window."""
    config = preset_config("tiny", index_topk=8)
    write_checkpoint(tmp_path, config, include_draft=False)
    model = DenseModel.from_checkpoint(tmp_path, indexer_format=indexer_format)
    prompt = random_prompt(config["vocab_size"], 140)
    expected = model.log_probs(prompt)
    for length in (1, 2, 3, 4, 5, 7, 8, 127, 128, 129):
        torch.testing.assert_close(model.log_probs(prompt[:length]), expected[:length], atol=1e-6, rtol=0)
    torch.testing.assert_close(model.log_probs(prompt, last=3), expected[-3:], atol=0, rtol=0)


@pytest.mark.parametrize("token_ids", [[], [128], [3, -1]])
def test_refuses_token_ids(tmp_path, token_ids):
    model = DenseModel.from_checkpoint(write_oracle_checkpoint(tmp_path, flash_like() | SMALL))
    with pytest.raises(ValueError, match="from 0 to 127"):
        model.forward(token_ids)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"kv_format": "int8"}, "kv_format 'int8'"),
        ({}, {"indexer_format": "fp4"}, "indexer_format 'fp4'"),
        ({"head_dim": 256}, {"kv_format": "fp8"}, "have 256"),
        ({"index_head_dim": 64}, {"indexer_format": "mxfp4"}, "have 64"),
        ({"torch_dtype": "float8"}, {}, "torch_dtype 'float8'"),
    ],
)
def test_refuses_options(tmp_path, config, options, message):
    (tmp_path / "config.json").write_text(json.dumps(flash_like() | SMALL | config))
    with pytest.raises(ConfigError, match=message):
        DenseModel.from_checkpoint(tmp_path, **options)


def test_refuses_an_incomplete_checkpoint(tmp_path):
    folder = write_oracle_checkpoint(tmp_path, flash_like() | SMALL)
    max(folder.glob("*.safetensors")).unlink()
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        DenseModel.from_checkpoint(folder)
