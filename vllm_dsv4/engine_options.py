"""Checks of the engine's options against what this model supports, before anything is loaded.

vLLM calls the two hooks while it builds its configuration: the first when the model's configuration is read, the second when
all options are known.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from vllm_dsv4.backend import select_backend
from vllm_dsv4.compat import (
    VerifyAndUpdateConfig,
    VllmConfig,
    allow_chunked_prefill_on_cpu,
    allow_cuda_graphs,
    current_platform,
)
from vllm_dsv4.config import ConfigError, Dsv4Config
from vllm_dsv4.quantization.config import Dsv4QuantConfig
from vllm_dsv4.quantization.formats import BLOCK_SIZE

logger = logging.getLogger("vllm.vllm_dsv4")

PACKED_KV_CACHE_DTYPES = ("fp8", "fp8_ds_mla")
"""Names that vLLM has for the 584-byte FP8 entries (``fp8`` is what its recipes for this model say)."""


class Dsv4EngineOptions(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        # vLLM removes the window from the model's configuration for this option, so it is looked at first.
        if model_config.disable_sliding_window:
            raise ConfigError("disable_sliding_window = True is not supported for DeepSeek-V4; serve without --disable-sliding-window")
        Dsv4Config.from_hf(model_config.hf_config)

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        check_engine_options(vllm_config)
        vllm_config.cache_config.block_size = BLOCK_SIZE
        allow_chunked_prefill_on_cpu(vllm_config)
        _choose_cuda_graphs(vllm_config)


def _choose_cuda_graphs(vllm_config: VllmConfig) -> None:
    """Turn CUDA graphs off where the reference ops run: they read values back to the host, which a graph cannot hold."""
    backend = select_backend(current_platform.device_type)
    if current_platform.is_cpu():
        return
    if backend.name != "reference":
        allow_cuda_graphs(vllm_config)
        return
    if not vllm_config.model_config.enforce_eager:
        logger.warning("CUDA graphs are turned off: %s", backend.reason)
    vllm_config.model_config.enforce_eager = True


def check_engine_options(vllm_config: VllmConfig) -> None:
    """Refuse options that the model would not honour.

    Raises:
        ConfigError: names the option, the value seen and what to use instead.
    """
    config = Dsv4Config.from_hf(vllm_config.model_config.hf_config)
    _check_model(vllm_config.model_config)
    _check_parallel(vllm_config.parallel_config, config)
    _check_cache(vllm_config, config)
    if vllm_config.lora_config is not None:
        raise ConfigError("LoRA (--enable-lora) is not supported for DeepSeek-V4; serve without it")
    if vllm_config.speculative_config is not None:
        method = vllm_config.speculative_config.method
        raise ConfigError(f"speculative decoding (method {method!r}) is not supported yet; serve without --speculative-config")


def _check_model(model: Any) -> None:
    if model.quantization not in (None, Dsv4QuantConfig.NAME):
        raise ConfigError(
            f"quantization = {model.quantization!r} is not supported for DeepSeek-V4; serve without --quantization: a checkpoint's own "
            "quantisation is recognised, and one without is served as it is"
        )
    if model.enable_prompt_embeds:
        raise ConfigError(
            "prompts given as embeddings (--enable-prompt-embeds) are not supported for DeepSeek-V4, whose first layers choose experts "
            "by token id; serve without it"
        )


def _check_parallel(parallel: Any, config: Dsv4Config) -> None:
    for option in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        value = getattr(parallel, option, 1)
        if value > 1:
            raise ConfigError(
                f"{option} = {value} is not supported for DeepSeek-V4; use tensor parallelism, or data parallelism with expert parallelism"
            )
    if parallel.enable_eplb:
        raise ConfigError("expert load balancing (--enable-eplb) is not supported for DeepSeek-V4; serve without it")
    if parallel.enable_dbo:
        raise ConfigError("dual batch overlap (--enable-dbo) is not supported for DeepSeek-V4; serve without it")
    tp_size = parallel.tensor_parallel_size
    if config.o_groups % tp_size != 0:
        sizes = ", ".join(str(size) for size in range(1, config.o_groups + 1) if config.o_groups % size == 0)
        raise ConfigError(f"tensor_parallel_size = {tp_size} does not divide the model's o_groups = {config.o_groups}; use one of {sizes}")
    if not parallel.enable_expert_parallel:
        _check_expert_slices(tp_size, parallel.data_parallel_size, config)


def _check_expert_slices(tp_size: int, dp_size: int, config: Dsv4Config) -> None:
    """Without expert parallelism vLLM slices every expert over all ranks, those of data parallelism too."""
    # A rank's slice of a quantised expert must be whole blocks of activation scales.
    block, size = 1 if config.quantization is None else 128, config.moe_intermediate_size
    if size % (block * tp_size * dp_size) != 0:
        raise ConfigError(
            f"tensor_parallel_size = {tp_size} and data_parallel_size = {dp_size} cut moe_intermediate_size = {size} into slices that are "
            f"not multiples of {block}; use fewer ranks, or --enable-expert-parallel"
        )


def _check_cache(vllm_config: VllmConfig, config: Dsv4Config) -> None:
    cache = vllm_config.cache_config
    if cache.user_specified_block_size and cache.block_size != BLOCK_SIZE:
        raise ConfigError(f"block_size = {cache.block_size} is not supported for DeepSeek-V4; leave --block-size out or pass {BLOCK_SIZE}")
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ConfigError(
            "disable_hybrid_kv_cache_manager = True is not supported for DeepSeek-V4, whose caches have pages of several sizes; "
            "serve without --disable-hybrid-kv-cache-manager"
        )
    kv_cache_dtype(cache.cache_dtype, vllm_config.model_config.dtype, config)
    indexer_format(vllm_config.attention_config.indexer_kv_dtype, config)


def kv_cache_dtype(option: str, model_dtype: torch.dtype, config: Dsv4Config) -> torch.dtype:
    """Storage of the window and entry caches: ``torch.uint8`` for packed 584-byte FP8 entries, else the dtype of plain rows.

    ``auto`` is packed FP8 for a quantised checkpoint and rows in the model's dtype for an unquantised one.
    """
    if option == "auto":
        return torch.uint8 if config.quantization is not None else model_dtype
    if option == "bfloat16":
        return torch.bfloat16
    if option in PACKED_KV_CACHE_DTYPES:
        if (config.head_dim, config.qk_rope_head_dim) != (512, 64):
            raise ConfigError(
                f"kv_cache_dtype = {option!r} needs head_dim 512 with 64 rotated dimensions, "
                f"got {config.head_dim} with {config.qk_rope_head_dim}; use 'bfloat16'"
            )
        return torch.uint8
    raise ConfigError(
        f"kv_cache_dtype = {option!r} is not supported for DeepSeek-V4; use 'auto', 'bfloat16' (plain rows) "
        f"or 'fp8' (packed 584-byte entries, what 'auto' means for a quantised checkpoint)"
    )


def indexer_format(option: str, config: Dsv4Config) -> str:
    """Storage of the indexer's keys: ``"fp8"`` (132 bytes), ``"mxfp4"`` (68 bytes, Hadamard-rotated) or ``"rows"``."""
    if option == "auto":
        return "fp8" if config.quantization is not None else "rows"
    if option in ("bf16", "bfloat16"):
        return "rows"
    if option in ("fp8", "mxfp4"):
        if config.index_head_dim != 128:
            raise ConfigError(f"indexer_kv_dtype = {option!r} needs index_head_dim 128, got {config.index_head_dim}; use 'bf16'")
        return option
    raise ConfigError(f"indexer_kv_dtype = {option!r} is not supported for DeepSeek-V4; use 'auto', 'fp8', 'mxfp4' or 'bf16'")
