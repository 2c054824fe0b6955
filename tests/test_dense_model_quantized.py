"""The dense model on quantised checkpoints against the definition, written afresh in ``definition.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from definition import DefinedModel, Roundings
from oracle import random_prompt

from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.checkpoint.writer import write_checkpoint
from vllm_dsv4.reference.model import DenseModel

# Both are float64 between the same roundings and choose the same experts and entries, so only the float32 of the logits
# and of their normalisation is left (some 1e-6). A single bfloat16 that rounds the other way changes all later rows by 0.01 or more.
TOLERANCE = 1e-5
CASES = {
    "flash": ("tiny", "fp4", Roundings()),
    "flash_mxfp4_indexer": ("tiny", "fp4", Roundings(indexer="mxfp4")),
    "flash_rows": ("tiny", "fp4", Roundings(kv="rows", indexer="rows")),
    "flash_base": ("tiny", "fp8", Roundings()),
    "pro_mxfp4_indexer": ("tiny-pro", "fp4", Roundings(indexer="mxfp4")),
}


def _checkpoint(folder: Path, preset: str = "tiny", expert_dtype: str = "fp4") -> tuple[Path, int]:
    # A window and a selection that are smaller than the prompt, so that both leave something out.
    config = preset_config(preset, expert_dtype=expert_dtype, sliding_window=48, index_topk=8)
    write_checkpoint(folder, config, seed=len(preset), include_draft=False)
    return folder, config["vocab_size"]


def _dense(folder: Path, roundings: Roundings) -> DenseModel:
    return DenseModel.from_checkpoint(
        folder, kv_format="bfloat16" if roundings.kv == "rows" else roundings.kv, indexer_format=roundings.indexer
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equals_definition(tmp_path, case):
    """150 tokens: they complete a window of 128, and 37 of 4."""
    preset, expert_dtype, roundings = CASES[case]
    folder, vocab_size = _checkpoint(tmp_path, preset, expert_dtype)
    prompt = random_prompt(vocab_size, 150, seed=1)
    expected = DefinedModel(folder, roundings).log_probs(prompt)
    np.testing.assert_allclose(_dense(folder, roundings).log_probs(prompt).numpy(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_every_rounding_shows(tmp_path):
    """Leaving out any one rounding moves the definition away from the dense model, by far more than the tolerance."""
    folder, vocab_size = _checkpoint(tmp_path)
    prompt = random_prompt(vocab_size, 60, seed=2)
    roundings = Roundings()
    dense = _dense(folder, roundings).log_probs(prompt).numpy()
    np.testing.assert_allclose(dense, DefinedModel(folder, roundings).log_probs(prompt), atol=TOLERANCE, rtol=0)
    for change in ({"activations": False}, {"pooled": False}, {"kv": "rows"}, {"indexer": "mxfp4"}, {"indexer": "rows"}):
        other = DefinedModel(folder, replace(roundings, **change)).log_probs(prompt)
        assert np.abs(dense - other).max() > 1000 * TOLERANCE, change
