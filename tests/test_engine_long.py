"""70,000 tokens of context: the served model, in chunks of 8,192 tokens, against the dense reference in one piece."""

from __future__ import annotations

import pytest
from engine import Batch, run_engine
from oracle import random_prompt

from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.checkpoint.writer import write_checkpoint
from vllm_dsv4.reference.model import DenseModel

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.slow

LENGTH = 70_000
# Both sides of a chunk's end, both sides of the end of YaRN's original context, and the last position.
POSITIONS = (8_191, 8_192, 8_193, 65_535, 65_536, 65_537, 69_999)
# One layer of each kind, with sizes for speed; RoPE as Flash has it.
SIZES = {
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128],
    "num_hash_layers": 1,
    "hidden_size": 64,
    "vocab_size": 128,
    "num_attention_heads": 1,
    "o_groups": 1,
    "o_lora_rank": 32,
    "q_lora_rank": 32,
    "head_dim": 48,
    "qk_rope_head_dim": 32,
    "index_head_dim": 32,
    "sliding_window": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "max_position_embeddings": 131_072,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65_536, "beta_fast": 32, "beta_slow": 1},
}


def test_log_probabilities_far_into_a_prompt(tmp_path) -> None:
    config = preset_config("tiny", quantized=False, dtype="float32", **SIZES)
    write_checkpoint(tmp_path, config, include_draft=False)
    prompt = random_prompt(config["vocab_size"], LENGTH + 1)
    result = run_engine(
        tmp_path,
        [Batch([prompt], 1, prompt_logprobs=True)],
        dtype="float32",
        max_model_len=LENGTH + 8,
        max_num_batched_tokens=8192,
    )
    served = result.batches[0][0].prompt_logprobs
    expected = DenseModel.from_checkpoint(tmp_path).log_probs(prompt)
    assert len(served) == LENGTH
    for position in POSITIONS:
        assert served[position] == pytest.approx(expected[position, prompt[position + 1]].item(), abs=1e-5), position
    worst = max(range(LENGTH), key=lambda position: abs(served[position] - expected[position, prompt[position + 1]].item()))
    assert served[worst] == pytest.approx(expected[worst, prompt[worst + 1]].item(), abs=1e-4), worst
