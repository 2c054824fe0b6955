"""Every vLLM name that this package uses and that may move between releases (vLLM 0.32 and 0.33).

Other modules import these from here, so that a new release of vLLM is met in this file; ``tests/test_contract.py`` checks
each against the sources of the supported releases.
"""

from __future__ import annotations

import os

import torch
from vllm.config import CUDAGraphMode, VllmConfig, get_current_vllm_config
from vllm.distributed import (
    get_dp_group,
    get_ep_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_world_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEFactory,
    FusedMoEMethodBase,
    MoERunner,
    RoutedExperts,
    RoutingMethodType,
    fused_moe_make_expert_params_mapping,
)
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_dsv4.quantization.formats import PAGE_ALIGNMENT

__all__ = [
    "CUDAGraphMode",
    "MODELS_CONFIG_MAP",
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionLayerBase",
    "AttentionMetadataBuilder",
    "BaseRouter",
    "ColumnParallelLinear",
    "CommonAttentionMetadata",
    "FusedMoEConfig",
    "FusedMoEFactory",
    "FusedMoEMethodBase",
    "KVCacheLayout",
    "KVCacheSpec",
    "LinearBase",
    "LinearMethodBase",
    "LogitsProcessor",
    "MoERunner",
    "ModelRegistry",
    "MultipleOf",
    "ParallelLMHead",
    "QuantizationConfig",
    "QuantizeMethodBase",
    "ReplicatedLinear",
    "RoutedExperts",
    "RoutingMethodType",
    "RowParallelLinear",
    "UnquantizedEmbeddingMethod",
    "VerifyAndUpdateConfig",
    "VllmConfig",
    "VocabParallelEmbedding",
    "allow_chunked_prefill_on_cpu",
    "allow_cuda_graphs",
    "current_platform",
    "fused_moe_make_expert_params_mapping",
    "get_current_vllm_config",
    "get_dp_group",
    "get_ep_group",
    "get_forward_context",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_world_group",
    "make_entry_spec",
    "make_sliding_spec",
    "num_tokens_across_dp",
    "register_quantization_config",
    "set_weight_attrs",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
]


def make_entry_spec(block_size: int, compress_ratio: int, entry: int, dtype: torch.dtype, packed: bool, kv_entry: bool) -> MLAAttentionSpec:
    """Spec of a cache with one entry for ``compress_ratio`` tokens; ``entry`` counts elements of ``dtype`` (bytes if packed).

    ``kv_entry`` marks the packed 584-byte entries; vLLM calls that format ``fp8_ds_mla``.
    """
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=entry,
        dtype=dtype,
        tokens_per_state=compress_ratio,
        alignment=PAGE_ALIGNMENT,
        state_content_bytes=entry if packed else None,
        cache_dtype_str="fp8_ds_mla" if kv_entry else None,
    )


def make_sliding_spec(block_size: int, window: int, entry: int, dtype: torch.dtype, packed: bool) -> SlidingWindowMLASpec:
    """Spec of a cache with one entry a token of which only the last ``window`` are kept."""
    return SlidingWindowMLASpec(
        block_size=block_size,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=entry,
        dtype=dtype,
        sliding_window=window,
        alignment=PAGE_ALIGNMENT,
        state_content_bytes=entry if packed else None,
        cache_dtype_str="fp8_ds_mla" if packed else None,
    )


def allow_chunked_prefill_on_cpu(vllm_config: VllmConfig) -> None:
    """Keep chunked prefill and prefix caching on CPUs without AMX.

    vLLM turns both off there for every model it takes for MLA, since its own MLA kernels need AMX. Ours do not, and nothing
    on the CPU reads the flag for our cache layers, which state their own specs.
    """
    if current_platform.is_cpu() and vllm_config.model_config is not None:
        vllm_config.model_config.model_arch_config.is_deepseek_mla = False


def allow_cuda_graphs(vllm_config: VllmConfig) -> None:
    """Choose CUDA graphs that hold this model, which is not compiled by torch.

    vLLM's second model runner records graphs of mixed batches, as "breakable" ones, with every cache's metadata, and this
    variable lets it; vLLM sets it by itself for the names of models that it knows. Its first runner records graphs of mixed
    batches without metadata, for compiled models that leave attention out: there only decode gets graphs.
    """
    graphs = vllm_config.compilation_config
    if vllm_config.use_v2_model_runner:
        os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    elif graphs.cudagraph_mode in (None, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE):
        graphs.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY


def num_tokens_across_dp() -> list[int]:
    """Tokens of this step on each data-parallel rank."""
    return get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
