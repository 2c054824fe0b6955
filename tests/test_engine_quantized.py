"""The served model on quantised checkpoints against the dense reference, which applies the same roundings.

Both compute in float64 between the roundings, so they must agree far more closely than any rounding would allow; a
difference in a single rounding would soon change the discrete choices of experts and entries, and with them the text.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine import Batch, run_engine
from oracle import random_prompt

from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.checkpoint.writer import write_checkpoint
from vllm_dsv4.reference.model import DenseModel

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.slow

TOLERANCE = 1e-5  # vLLM reports float32
NEW_TOKENS = 60

# name: (preset, its options, the engine's options, the dense model's formats)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "as_released": ("tiny", {}, {}, {}),
    "pro": ("tiny-pro", {}, {}, {}),
    "fp8_experts": ("tiny", {"expert_dtype": "fp8"}, {}, {}),
    "official_indexer": ("tiny", {}, {"attention_config": {"indexer_kv_dtype": "mxfp4"}}, {"indexer_format": "mxfp4"}),
    "plain_rows": ("tiny-0731", {}, {"kv_cache_dtype": "bfloat16"}, {"kv_format": "rows"}),
    "unquantised_bfloat16": ("tiny", {"quantized": False}, {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_served_equals_dense(case: str, tmp_path) -> None:
    preset, checkpoint, engine, dense = CASES[case]
    config = preset_config(preset, **checkpoint)
    write_checkpoint(tmp_path, config, seed=3)
    prompts = [random_prompt(config["vocab_size"], length, seed=length) for length in (300, 131)]
    result = run_engine(
        tmp_path, [Batch(prompts, NEW_TOKENS, prompt_logprobs=True)], max_model_len=512, max_num_batched_tokens=96, **engine
    )
    model = DenseModel.from_checkpoint(tmp_path, **dense)
    for prompt, completion in zip(prompts, result.batches[0], strict=True):
        sequence = prompt + completion.token_ids
        expected = model.log_probs(sequence)
        assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == completion.token_ids
        for position, value in enumerate(completion.prompt_logprobs):
            assert value == pytest.approx(expected[position, sequence[position + 1]].item(), abs=TOLERANCE)
        for step, logprobs in enumerate(completion.logprobs):
            for token, value in logprobs.items():
                assert value == pytest.approx(expected[len(prompt) - 1 + step, token].item(), abs=TOLERANCE)
