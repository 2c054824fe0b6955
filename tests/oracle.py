"""transformers' DeepSeek-V4 in float32, as the oracle of whole-model tests (model.md 8).

Checkpoints are written with every tensor random (none keeps a neutral default that would hide a bug) under DeepSeek's own
names; transformers reads them with its own table of names, so that ours is tested too.

    folder = write_oracle_checkpoint(tmp_path, flash_like())
    log_probs = hf_log_probs(load_hf(folder), prompt)
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.checkpoint.writer import write_checkpoint


def flash_like(**overrides: Any) -> dict[str, Any]:
    """As Flash: two layers of ratio 0 first, three hash-routed layers, so that each kind of routing meets each ratio."""
    return _unquantised("tiny", num_hidden_layers=6, compress_ratios=[0, 0, 4, 128, 4, 0, 0], index_topk=24, **overrides)


def pro_like(**overrides: Any) -> dict[str, Any]:
    """As Pro: no layer of ratio 0."""
    return _unquantised("tiny-pro", **overrides)


def topk_small(**overrides: Any) -> dict[str, Any]:
    """Far fewer entries selected than visible, and all layers choose their experts by score."""
    return _unquantised("tiny", compress_ratios=[4, 0, 4, 128, 4], index_topk=6, num_hash_layers=0, **overrides)


NAMED_CONFIGS = {"flash_like": flash_like, "pro_like": pro_like, "topk_small": topk_small}


def random_config(seed: int) -> dict[str, Any]:
    """A valid configuration that nobody picked: sizes, ratios, windows, experts, hyper-connections and RoPE are all drawn."""
    draw = random.Random(seed)
    num_layers = draw.randint(3, 6)
    ratios = [4, *(draw.choice((0, 4, 128)) for _ in range(num_layers - 1))]
    draw.shuffle(ratios)
    rope_dim = draw.choice((8, 16, 32, 64))
    groups, num_experts = draw.choice((1, 2, 3, 4)), draw.randint(3, 16)
    overrides = {
        "vocab_size": draw.randint(100, 700),
        "hidden_size": 8 * draw.randint(8, 32),
        "num_hidden_layers": num_layers,
        "compress_ratios": ratios + [0] * draw.randint(0, 3),
        "num_attention_heads": groups * draw.randint(1, 4),
        "head_dim": draw.choice((64, 128, 256, 512)),
        "qk_rope_head_dim": rope_dim,
        "q_lora_rank": 8 * draw.randint(4, 20),
        "o_groups": groups,
        "o_lora_rank": 8 * draw.randint(3, 12),
        "sliding_window": draw.choice((8, 16, 50, 64, 100, 128, 200)),
        # Fewer index heads tie, since relu clips all of them for some entries (model.md 8.3).
        "index_n_heads": draw.choice((16, 24, 32)),
        "index_head_dim": draw.choice([size for size in (32, 64, 128) if size >= rope_dim]),
        "index_topk": draw.randint(4, 80),
        "n_routed_experts": num_experts,
        "num_experts_per_tok": draw.randint(1, min(4, num_experts)),
        "moe_intermediate_size": 8 * draw.randint(4, 24),
        "num_hash_layers": draw.randint(0, num_layers),
        "routed_scaling_factor": draw.choice((1.0, 1.5, 2.5)),
        "swiglu_limit": draw.choice((0.5, 1.5, 10.0)),
        "hc_mult": draw.choice((2, 3, 4, 5)),
        "hc_sinkhorn_iters": draw.choice((1, 2, 5, 20)),
        "hc_eps": draw.choice((1e-6, 1e-3)),
        "rms_norm_eps": draw.choice((1e-6, 1e-4)),
        "rope_theta": draw.choice((1000.0, 10000.0, 500000.0)),
        "compress_rope_theta": draw.choice((2000.0, 40000.0, 160000.0)),
        "rope_scaling": _random_scaling(draw),
        "num_nextn_predict_layers": 0,
    }
    return _unquantised("tiny", **overrides)


def _random_scaling(draw: random.Random) -> dict[str, Any] | None:
    if draw.random() < 0.2:
        return None
    return {
        "type": "yarn",
        "factor": draw.choice((2, 16, 40)),
        "original_max_position_embeddings": draw.choice((32, 64, 256, 4096)),
        "beta_fast": draw.choice((16, 32)),
        "beta_slow": draw.choice((1, 2)),
    }


def _unquantised(preset: str, **overrides: Any) -> dict[str, Any]:
    return preset_config(preset, quantized=False, dtype="float32", **overrides)


def random_prompt(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(length)]


def write_oracle_checkpoint(folder: str | Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write a checkpoint that both vLLM and transformers can read; returns its folder."""
    write_checkpoint(folder, config, seed=seed)
    return Path(folder)


def load_hf(folder: str | Path) -> Any:
    """``DeepseekV4ForCausalLM`` of an unquantised checkpoint, in float32, with every tensor accounted for."""
    from transformers import DeepseekV4ForCausalLM

    model, info = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    faults = {kind: names for kind, names in info.items() if names}
    assert not faults, f"transformers did not read {folder} whole: {faults}"
    return model.eval()


@torch.inference_mode()
def hf_log_probs(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token after each token of one sequence: [T, V] float32."""
    logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


@torch.inference_mode()
def hf_greedy(model: Any, token_ids: list[int], new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """The likeliest continuation, one token at a time over a cache: its tokens, and log-probabilities [new_tokens, V]."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    step, generated, rows = token_ids, [], []
    for _ in range(new_tokens):
        logits = model(torch.tensor([step]), past_key_values=cache, use_cache=True).logits[0, -1]
        rows.append(logits.float().log_softmax(-1))
        generated.append(int(rows[-1].argmax()))
        step = generated[-1:]
    return generated, torch.stack(rows)
