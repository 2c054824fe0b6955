"""``config.json`` of the real models and of tiny ones with the same structure, as dicts with the keys of the real file."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

# Smallest sizes at which nothing degenerates: head and index dimensions are those of the cache layouts, the rest are
# multiples of the 128-wide FP8 blocks also on each of two tensor-parallel ranks, YaRN begins inside an ordinary prompt.
_TINY: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "index_n_heads": 16,
    "index_topk": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 8192,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 512, "type": "yarn"},
}
_TINY_PRO: dict[str, Any] = {
    **_TINY,
    "hidden_size": 384,
    "num_attention_heads": 8,
    "q_lora_rank": 256,
    "o_groups": 4,
    "compress_ratios": [128, 128, 4, 128, 4, 0],
    "index_topk": 48,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}
_DRAFT_0731: dict[str, Any] = {
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 1023,
    "dspark_target_layer_ids": [2, 3, 4],
    "compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0],
}
# V4-Pro's differences from Flash (model.md 1.2).
_PRO: dict[str, Any] = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "tiny-pro": _TINY_PRO,
    "tiny-0731": {**_TINY, **_DRAFT_0731},
    "flash": {},
    "pro": _PRO,
}
"""Differences of each named configuration from DeepSeek-V4-Flash."""


def preset_config(
    preset: str = "tiny", *, quantized: bool = True, expert_dtype: str = "fp4", dtype: str = "bfloat16", **overrides: Any
) -> dict[str, Any]:
    """The raw ``config.json`` of a named configuration.

    Args:
        preset: a name in ``PRESETS``.
        quantized: False drops ``quantization_config`` and ``expert_dtype``, as in a checkpoint of plain weights.
        expert_dtype: ``"fp4"`` as Flash, ``"fp8"`` as Flash-Base; only of a quantised checkpoint.
        dtype: ``torch_dtype``.
        overrides: other values for single keys. A ``num_hidden_layers`` without ``compress_ratios`` cuts the pattern of ratios,
            or continues it with 4 and 128 in turn.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r} is unknown; choose one of {sorted(PRESETS)}")
    if expert_dtype not in ("fp4", "fp8"):
        raise ValueError(f"expert_dtype must be 'fp4' or 'fp8', got {expert_dtype!r}")
    raw = json.loads(files("vllm_dsv4.checkpoint").joinpath("data/flash_config.json").read_text())
    raw |= {"torch_dtype": dtype, "expert_dtype": expert_dtype, **PRESETS[preset]}
    if "num_hidden_layers" in overrides and "compress_ratios" not in overrides:
        raw["compress_ratios"] = _resize_ratios(raw["compress_ratios"], raw["num_hidden_layers"], overrides["num_hidden_layers"])
    raw |= overrides
    if not quantized:
        del raw["quantization_config"], raw["expert_dtype"]
    elif expert_dtype == "fp8":
        del raw["quantization_config"]["scale_fmt"]  # float32 scales (model.md 1.1)
    return raw


def _resize_ratios(ratios: list[int], old: int, new: int) -> list[int]:
    backbone, draft = ratios[:old], ratios[old:]
    while len(backbone) < new:
        backbone.append(128 if backbone[-1] == 4 else 4)
    return backbone[:new] + draft
