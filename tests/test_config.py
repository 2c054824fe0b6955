"""``Dsv4Config`` reads the raw config.json, vLLM 0.32's config object and transformers' config class alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_dsv4.checkpoint.tiny import PRESETS, preset_config
from vllm_dsv4.config import ConfigError, Dsv4Config, QuantizationFormat, YarnScaling


def _through_transformers(raw: dict[str, Any]) -> Any:
    return pytest.importorskip("transformers").DeepseekV4Config(**raw)


def _through_saved_transformers(raw: dict[str, Any]) -> Any:
    return json.loads(_through_transformers(raw).to_json_string())


def _through_vllm(raw: dict[str, Any]) -> Any:
    module = pytest.importorskip("vllm.transformers_utils.configs.deepseek_v4", reason="vLLM 0.33 has no config class of its own")
    return module.DeepseekV4Config(**raw)


READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "transformers": _through_transformers,
    "transformers-saved": _through_saved_transformers,
    "vllm": _through_vllm,
}

CASES: dict[str, dict[str, Any]] = {
    **{name: preset_config(name) for name in PRESETS},
    "unquantised": preset_config("tiny", quantized=False, dtype="float32"),
    "fp8-experts": preset_config("tiny", expert_dtype="fp8"),
    "no-yarn": preset_config("tiny", rope_scaling=None),
    "other-theta": preset_config("tiny", rope_theta=5000, compress_rope_theta=80000),
    "three-hash-layers-of-two": preset_config("tiny", num_hidden_layers=2),
    "no-hash-layers": preset_config("tiny", num_hash_layers=0),
    "small-heads": preset_config("tiny", quantized=False, head_dim=96, qk_rope_head_dim=32, index_head_dim=64),
    "yarn-corrections": preset_config(
        "tiny",
        rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024, "beta_fast": 16, "beta_slow": 2},
    ),
    "rope_type-spelling": preset_config(
        "tiny", rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", CASES)
def test_all_config_forms_agree(case: str, reader: str) -> None:
    raw = CASES[case]
    assert Dsv4Config.from_hf(READERS[reader](json.loads(json.dumps(raw)))) == Dsv4Config.from_hf(raw)


def test_flash_values() -> None:
    """The table of model.md 1.1."""
    config = Dsv4Config.from_hf(preset_config("flash"))
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (129280, 4096, 43, 64)
    assert (config.head_dim, config.qk_rope_head_dim, config.qk_nope_head_dim) == (512, 64, 448)
    assert (config.q_lora_rank, config.o_groups, config.o_lora_rank, config.heads_per_group) == (1024, 8, 1024, 8)
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (64, 128, 512)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_shared_experts) == (256, 6, 1)
    assert (config.moe_intermediate_size, config.routed_scaling_factor, config.swiglu_limit) == (2048, 1.5, 10.0)
    assert (config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps, config.hc_rows) == (4, 20, 1e-6, 1e-6, 24)
    assert (config.rope_theta, config.compress_rope_theta) == (10000.0, 160000.0)
    assert config.yarn == YarnScaling(factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1)
    assert (config.max_position_embeddings, config.sliding_window, config.num_nextn_predict_layers) == (1048576, 128, 1)
    assert config.quantization == QuantizationFormat(weight_block_size=(128, 128), experts="mxfp4")
    assert config.compress_ratios[:3] == (0, 0, 4)
    assert [layer for layer, ratio in enumerate(config.compress_ratios) if ratio == 4] == list(range(2, 43, 2))
    assert [layer for layer, ratio in enumerate(config.compress_ratios) if ratio == 128] == list(range(3, 42, 2))
    assert [config.is_hash_layer(layer) for layer in range(5)] == [True, True, True, False, False]


def test_pro_values() -> None:
    """Model.md 1.2: no ratio-0 layer in the backbone."""
    config = Dsv4Config.from_hf(preset_config("pro"))
    assert config.compress_ratios == (128, 128) + (4, 128) * 29 + (4,)
    assert (config.hidden_size, config.num_attention_heads, config.o_groups, config.heads_per_group) == (7168, 128, 16, 8)
    assert (config.n_routed_experts, config.routed_scaling_factor, config.index_topk) == (384, 2.5, 1024)


def test_0731_release_keys_are_accepted() -> None:
    """46 ratios, three of them for draft layers, and dspark_* keys; the backbone is the base release's (model.md 1.1, 6)."""
    base = preset_config("flash")
    release = preset_config(
        "flash",
        compress_ratios=base["compress_ratios"][:43] + [0, 0, 0],
        dspark_block_size=5,
        dspark_noise_token_id=128799,
        dspark_target_layer_ids=[40, 41, 42],
        dspark_markov_rank=256,
    )
    assert len(release["compress_ratios"]) == 46
    for read in (dict, _through_transformers):
        assert Dsv4Config.from_hf(read(release)) == Dsv4Config.from_hf(base)


def test_missing_expert_dtype_means_fp4() -> None:
    raw = preset_config("flash")
    del raw["expert_dtype"]
    assert Dsv4Config.from_hf(raw).quantization == QuantizationFormat((128, 128), "mxfp4")


def test_quantisation_method_renamed_by_vllm_is_read() -> None:
    raw = preset_config("flash")
    raw["quantization_config"]["quant_method"] = "deepseek_v4_fp8"
    assert Dsv4Config.from_hf(raw).quantization == QuantizationFormat((128, 128), "mxfp4")


def test_from_json_takes_folder_or_file(tmp_path: Path) -> None:
    raw = preset_config("tiny")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert Dsv4Config.from_json(tmp_path) == Dsv4Config.from_json(tmp_path / "config.json") == Dsv4Config.from_hf(raw)


YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 512}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
    ({"norm_topk_prob": False}, "norm_topk_prob = False"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
    ({"vision_n_layers": 12}, "vision"),
    ({"compress_ratios": [0, 0, 4, 7, 4, 0]}, "compress ratio 7 of layer 3"),
    ({"compress_ratios": [0, 1, 4, 128, 4, 0]}, "compress ratio 1 of layer 1"),
    ({"compress_ratios": [0, 0, 4]}, "compress_ratios has 3 items, fewer than num_hidden_layers = 5"),
    ({"compress_ratios": None}, "neither compress_ratios nor layer_types"),
    ({"compress_ratios": None, "layer_types": ["full_attention"] * 5}, r"layer_types \['full_attention'\]"),
    ({"num_hash_layers": None}, "neither num_hash_layers nor mlp_layer_types"),
    ({"num_hash_layers": None, "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe", "moe"]}, "hash-routed layers must come first"),
    ({"rope_scaling": {**YARN, "type": "linear"}}, "RoPE scaling 'linear'"),
    ({"rope_scaling": {**YARN, "mscale": 0.707}}, "magnitude factors"),
    ({"rope_scaling": {**YARN, "mscale_all_dim": 1.0}}, "magnitude factors"),
    ({"rope_scaling": {**YARN, "attention_factor": 0.9}}, "magnitude factors"),
    ({"rope_scaling": {"type": "yarn", "factor": 16}}, "YaRN scaling needs original_max_position_embeddings"),
    ({"quantization_config": {**FP8, "quant_method": "awq"}}, "quantization 'awq'"),
    ({"quantization_config": {**FP8, "fmt": "e5m2"}}, "fmt 'e5m2'"),
    ({"quantization_config": {**FP8, "moe_quant_algo": "NVFP4"}}, "NVFP4"),
    ({"quantization_config": {**FP8, "weight_block_size": [64, 64]}}, r"weight_block_size \[64, 64\]"),
    ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size"),
    ({"expert_dtype": "int4"}, "expert_dtype 'int4'"),
    ({"num_attention_heads": 5}, r"num_attention_heads \(5\) must be a multiple of o_groups \(2\)"),
    ({"qk_rope_head_dim": 63}, r"rotated dimension \(63\) must be even"),
    ({"qk_rope_head_dim": 256}, r"at most index_head_dim \(128\)"),
    ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) exceeds n_routed_experts \(8\)"),
    ({"n_shared_experts": 0}, "n_shared_experts must be at least 1"),
    ({"head_dim": 256}, "head_dim = 512 .*got 256"),
    ({"qk_rope_head_dim": 32}, "qk_rope_head_dim = 64 .*got 32"),
    ({"index_head_dim": 64}, "index_head_dim = 128 .*got 64"),
    ({"hidden_size": 200}, "hidden_size to be a multiple of 128, got 200"),
    ({"moe_intermediate_size": 192}, "moe_intermediate_size to be a multiple of 128, got 192"),
    ({"q_lora_rank": 96}, "q_lora_rank to be a multiple of 128"),
    ({"o_lora_rank": 64}, "o_lora_rank to be a multiple of 128"),
    ({"hidden_size": None}, "no 'hidden_size'"),
    ({"hidden_size": "256"}, "hidden_size in config.json must be a number, got '256'"),
    ({"hidden_size": True}, "hidden_size in config.json must be a number, got True"),
    ({"index_topk": 32.5}, "index_topk in config.json must be a whole number, got 32.5"),
    ({"vocab_size": -1}, "vocab_size in config.json must be a whole number, got -1"),
]


@pytest.mark.parametrize(("change", "message"), REJECTED, ids=[str(change)[:60] for change, _ in REJECTED])
def test_rejections_name_key_and_value(change: dict[str, Any], message: str) -> None:
    raw = {**preset_config("tiny"), **change}
    with pytest.raises(ConfigError, match=message):
        Dsv4Config.from_hf(raw)


def test_another_model_is_rejected() -> None:
    with pytest.raises(ConfigError, match="is this a DeepSeek-V4 checkpoint"):
        Dsv4Config.from_hf({"model_type": "llama", "hidden_size": 4096})
