"""Scratch memory of the dense model: it must reach tens of thousands of tokens, so nothing may be quadratic in the length."""

from __future__ import annotations

import pytest
from oracle import flash_like, random_prompt, write_oracle_checkpoint
from tolerances import LargestTensor

from vllm_dsv4.reference.model import DenseModel

LENGTH, WINDOW, TOPK = 2048, 16, 6
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "index_head_dim": 32,
    "moe_intermediate_size": 32,
    "sliding_window": WINDOW,
    "num_nextn_predict_layers": 0,
}


def _largest(model: DenseModel, length: int) -> int:
    with LargestTensor() as largest:
        model.forward(random_prompt(SMALL["vocab_size"], length))
    return largest.elements


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_no_tensor_is_quadratic(tmp_path, ratio):
    """Few small heads, so that a tile's budget alone would allow all queries, and their masks, at once."""
    config = {key: value for key, value in flash_like().items() if key not in SMALL}
    config |= SMALL | {"num_hidden_layers": 1, "num_hash_layers": 1, "compress_ratios": [ratio], "index_topk": TOPK}
    model = DenseModel.from_checkpoint(write_oracle_checkpoint(tmp_path, config))
    short, long = _largest(model, LENGTH // 4), _largest(model, LENGTH)
    assert long <= 4 * short
    # Tensors that are kept whole have at most the size of the residual streams; tiles of scores have room for twice that.
    assert long <= 2 * LENGTH * config["hc_mult"] * SMALL["hidden_size"]
