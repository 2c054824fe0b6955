"""Options that the model does not support are refused while vLLM builds its configuration, before any weight is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import Batch, run_engine

from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.config import ConfigError, Dsv4Config

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs  # noqa: E402

from vllm_dsv4.compat import CUDAGraphMode, allow_cuda_graphs  # noqa: E402
from vllm_dsv4.engine_options import check_engine_options, indexer_format, kv_cache_dtype  # noqa: E402

FP8 = preset_config("tiny")["quantization_config"]
PLAIN = preset_config("tiny", quantized=False)

EngineConfig = Callable[..., Any]


@pytest.fixture
def engine_config(tmp_path: Path) -> EngineConfig:
    """Builds vLLM's configuration as ``vllm.LLM`` and the server do, for a folder that holds a config.json and nothing else."""

    def build(raw: dict[str, Any] | None = None, **options: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(raw or preset_config("tiny")))
        return EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, **options).create_engine_config()

    return build


REFUSED_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2 is not supported .* use tensor parallelism"),
    ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size = 2 is not supported .* use tensor parallelism"),
    (
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
        "decode_context_parallel_size = 2 is not supported .* use tensor parallelism",
    ),
    ({"enable_lora": True}, "--enable-lora.* is not supported .* serve without"),
    ({"block_size": 64}, "block_size = 64 is not supported .* pass 256"),
    ({"block_size": 512}, "block_size = 512 is not supported .* pass 256"),
    *(
        ({"kv_cache_dtype": name}, f"kv_cache_dtype = '{name}' is not supported .* use 'auto', 'bfloat16'")
        for name in ("fp8_e5m2", "fp8_e4m3", "fp8_inc", "float16", "nvfp4", "int8_per_token_head", "turboquant_k8v4")
    ),
    ({"attention_config": {"indexer_kv_dtype": "nvfp4"}}, "indexer_kv_dtype = 'nvfp4' is not supported .* use 'auto', 'fp8'"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}, "'ngram'.* serve without"),
    ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "'mtp'.* serve without --speculative-config"),
    ({"tensor_parallel_size": 3}, "tensor_parallel_size = 3 does not divide the model's o_groups = 2; use one of 1, 2"),
    ({"tensor_parallel_size": 4}, "tensor_parallel_size = 4 does not divide"),
    (
        {"tensor_parallel_size": 2, "data_parallel_size": 2},
        "tensor_parallel_size = 2 and data_parallel_size = 2 cut moe_intermediate_size = 256 .* --enable-expert-parallel",
    ),
    ({"quantization": "awq"}, "quantization = 'awq' does not fit .* serve without --quantization"),
    ({"quantization": "modelopt_fp4"}, "quantization = 'modelopt_fp4' does not fit .* serve without --quantization"),
    ({"enable_prompt_embeds": True}, "--enable-prompt-embeds.* not supported .* serve without"),
    ({"disable_sliding_window": True}, "disable_sliding_window = True is not supported .* serve without"),
    ({"disable_hybrid_kv_cache_manager": True}, "disable_hybrid_kv_cache_manager = True is not supported .* serve without"),
    ({"enable_dbo": True}, "--enable-dbo.* is not supported .* serve without"),
    # vLLM's own checks come first.
    ({"dtype": "float16"}, r"torch.float16 is not supported for quantization method dsv4.*\[torch.bfloat16\]"),
    ({"max_model_len": 8193}, r"max_model_len \(8193\) is greater than .* \(max_position_embeddings=8192"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED_OPTIONS, ids=[str(options)[:70] for options, _ in REFUSED_OPTIONS])
def test_option_is_refused(engine_config: EngineConfig, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config(**options)


REFUSED_CHECKPOINTS: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {**FP8, "moe_quant_algo": "NVFP4"}}, "NVFP4 .*moe_quant_algo.* serve a checkpoint with MXFP4 or FP8 experts"),
    ({"quantization_config": {**FP8, "weight_block_size": [64, 64]}}, r"weight_block_size \[64, 64\] .* expected \[128, 128\]"),
    ({"quantization_config": {**FP8, "fmt": "e5m2"}}, "fmt 'e5m2'.* expected .*'e4m3'"),
    *(
        ({"quantization_config": {"quant_method": method, "bits": 4, "group_size": 128}}, f"quantization '{method}' .* expected .*'fp8'")
        for method in ("awq", "modelopt", "modelopt_fp4", "quark", "mxfp4", "compressed-tensors", "unheard-of")
    ),
    ({"expert_dtype": "int4"}, "expert_dtype 'int4' .* expected 'fp4' or 'fp8'"),
    ({"vision_n_layers": 4}, "vision_n_layers = 4.* serve a text-only DeepSeek-V4"),
    ({"compress_ratios": [0, 0, 4, 7, 4, 0]}, r"compress ratio 7 of layer 3 .* known are \(0, 4, 128\)"),
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax' .* have 'sqrtsoftplus'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED_CHECKPOINTS, ids=[str(change)[:70] for change, _ in REFUSED_CHECKPOINTS])
def test_checkpoint_is_refused(engine_config: EngineConfig, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config({**preset_config("tiny"), **change})


@pytest.mark.parametrize("method", ["fp8", "fp8_per_tensor", "experts_int8"])
def test_unquantised_checkpoint_is_not_quantised_on_the_way(engine_config: EngineConfig, method: str) -> None:
    with pytest.raises(ValueError, match=f"quantization = '{method}' is not supported .* serve without --quantization"):
        engine_config(PLAIN, quantization=method)


@pytest.mark.parametrize("option", ["enable_eplb", "enable_dbo"])
def test_options_that_only_gpus_have_are_refused(engine_config: EngineConfig, option: str) -> None:
    """VLLM refuses some of them itself on the CPU, so the check is asked directly."""
    config = engine_config()
    check_engine_options(config)
    setattr(config.parallel_config, option, True)
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')}.* serve without"):
        check_engine_options(config)


@pytest.mark.slow
def test_refusal_ends_the_engine_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(preset_config("tiny")))
    with pytest.raises(AssertionError, match="block_size = 64 is not supported for DeepSeek-V4"):
        run_engine(tmp_path, [Batch([[5]], 1)], block_size=64)


ACCEPTED_OPTIONS: list[dict[str, Any]] = [
    {},
    {"block_size": 256},
    {"kv_cache_dtype": "bfloat16"},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "fp8_ds_mla"},
    {"attention_config": {"indexer_kv_dtype": "mxfp4"}},
    {"quantization": "fp8"},
    {"quantization": "deepseek_v4_fp8"},
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    {"enable_prefix_caching": False},
]


@pytest.mark.parametrize("options", ACCEPTED_OPTIONS, ids=str)
def test_option_is_accepted(engine_config: EngineConfig, options: dict[str, Any]) -> None:
    config = engine_config(**options)
    assert config.cache_config.block_size == 256
    assert config.model_config.quantization == "dsv4" and type(config.quant_config).__name__ == "Dsv4QuantConfig"
    assert config.cache_config.enable_prefix_caching is options.get("enable_prefix_caching", True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_unquantised_checkpoint_is_accepted(engine_config: EngineConfig, dtype: str) -> None:
    config = engine_config(preset_config("tiny", quantized=False, dtype=dtype), dtype=dtype)
    assert config.model_config.quantization is None and config.model_config.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("architecture", ["DeepseekV4ForCausalLM", "DeepseekV4FlashForCausalLM"])
def test_both_architectures_are_ours(engine_config: EngineConfig, architecture: str) -> None:
    config = engine_config({**preset_config("tiny"), "architectures": [architecture]})
    model_class, _ = config.model_config.registry.resolve_model_cls([architecture], config.model_config)
    assert model_class.__module__.startswith("vllm_dsv4.")
    with pytest.raises(ValueError, match="block_size = 64"):
        engine_config({**preset_config("tiny"), "architectures": [architecture]}, block_size=64)


@pytest.mark.parametrize("has_amx", [False, True], ids=["no-amx", "amx"])
def test_chunked_prefill_and_prefix_caching_stay_enabled(
    engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch, has_amx: bool
) -> None:
    """VLLM turns them off for MLA models on CPUs without AMX, and raises the budget to the longest prompt."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    config = engine_config(max_num_batched_tokens=64, max_model_len=2048)
    assert config.scheduler_config.enable_chunked_prefill and config.cache_config.enable_prefix_caching
    assert config.scheduler_config.max_num_batched_tokens == 64


@pytest.mark.parametrize(
    ("option", "quantised", "plain"),
    [
        ("auto", torch.uint8, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("fp8", torch.uint8, torch.uint8),
        ("fp8_ds_mla", torch.uint8, torch.uint8),
    ],
)
def test_kv_cache_dtype(option: str, quantised: torch.dtype, plain: torch.dtype) -> None:
    assert kv_cache_dtype(option, torch.float32, Dsv4Config.from_hf(preset_config("tiny"))) == quantised
    assert kv_cache_dtype(option, torch.float32, Dsv4Config.from_hf(PLAIN)) == plain


@pytest.mark.parametrize(
    ("option", "quantised", "plain"),
    [("auto", "fp8", "rows"), ("fp8", "fp8", "fp8"), ("mxfp4", "mxfp4", "mxfp4"), ("bf16", "rows", "rows"), ("bfloat16", "rows", "rows")],
)
def test_indexer_format(option: str, quantised: str, plain: str) -> None:
    assert indexer_format(option, Dsv4Config.from_hf(preset_config("tiny"))) == quantised
    assert indexer_format(option, Dsv4Config.from_hf(PLAIN)) == plain


def test_packed_formats_need_the_layouts_sizes() -> None:
    small = Dsv4Config.from_hf(preset_config("tiny", quantized=False, head_dim=96, qk_rope_head_dim=32, index_head_dim=64))
    assert kv_cache_dtype("auto", torch.bfloat16, small) == torch.bfloat16 and indexer_format("auto", small) == "rows"
    with pytest.raises(ConfigError, match="kv_cache_dtype = 'fp8' needs head_dim 512 .* got 96 with 32; use 'bfloat16'"):
        kv_cache_dtype("fp8", torch.bfloat16, small)
    with pytest.raises(ConfigError, match="indexer_kv_dtype = 'mxfp4' needs index_head_dim 128, got 64; use 'bf16'"):
        indexer_format("mxfp4", small)


def test_graphs_of_the_first_model_runner_hold_decode_only(engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs of mixed batches are recorded without metadata, and would leave all attention out."""
    config = engine_config()
    monkeypatch.setattr(type(config), "use_v2_model_runner", False)
    for mode, chosen in ((None, "FULL_DECODE_ONLY"), (CUDAGraphMode.FULL_AND_PIECEWISE, "FULL_DECODE_ONLY"), (CUDAGraphMode.NONE, "NONE")):
        config.compilation_config.cudagraph_mode = mode
        allow_cuda_graphs(config)
        assert config.compilation_config.cudagraph_mode.name == chosen


def test_graphs_of_the_second_model_runner_hold_mixed_batches(engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config()
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH", raising=False)
    before = config.compilation_config.cudagraph_mode
    allow_cuda_graphs(config)
    assert os.environ.pop("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1"
    assert config.compilation_config.cudagraph_mode == before


def test_an_unknown_backend_is_refused(engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DSV4_BACKEND", "cuda")
    with pytest.raises(ValueError, match="VLLM_DSV4_BACKEND='cuda' is not a backend; choose one of"):
        engine_config()
