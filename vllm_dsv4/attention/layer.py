"""Attention of one layer: a sliding window of tokens, plus compressed entries of everything before (model.md 3.4)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad

from vllm_dsv4 import ops
from vllm_dsv4.attention.cache import CacheFactory
from vllm_dsv4.attention.compressor import Compressor, Norm
from vllm_dsv4.attention.indexer import Indexer
from vllm_dsv4.attention.metadata import WindowMetadata
from vllm_dsv4.compat import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    set_weight_attrs,
)
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.parallel import PARTIAL_SUM_DTYPE, sum_over_ranks
from vllm_dsv4.quantization.config import Dsv4QuantConfig
from vllm_dsv4.quantization.grouped_output import GroupedOutputProjection
from vllm_dsv4.quantization.linear import set_out_dtype
from vllm_dsv4.quantization.merged import MergedLinear


class Attention(nn.Module):
    """``attn`` of a layer: [num_tokens, hidden_size] → same. Heads and output groups are split over ranks, caches are not."""

    def __init__(self, config: Dsv4Config, layer: int, caches: CacheFactory, quant_config: Dsv4QuantConfig, prefix: str):
        super().__init__()
        tp_size = get_tensor_model_parallel_world_size()
        self.num_heads, self.head_dim = config.num_attention_heads // tp_size, config.head_dim
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.compress_ratio = config.compress_ratios[layer]
        self._create_projections(config, quant_config, tp_size, prefix)
        self.attn_sink = nn.Parameter(torch.zeros(self.num_heads, dtype=torch.float32), requires_grad=False)
        set_weight_attrs(self.attn_sink, {"weight_loader": _load_head_slice})
        self.window_cache = caches.window(f"{prefix}.window_cache")
        self.indexer: Indexer | None = None
        if self.compress_ratio:
            self.entry_cache = caches.entries(f"{prefix}.entry_cache", self.compress_ratio)
            self.compressor = Compressor(config, caches, self.compress_ratio, config.head_dim, self.entry_cache, f"{prefix}.compressor")
        if self.compress_ratio == 4:
            self.indexer = Indexer(config, caches, self.compress_ratio, quant_config, f"{prefix}.indexer")
        self._merge_projections()

    def _create_projections(self, config: Dsv4Config, quant_config: Dsv4QuantConfig, tp_size: int, prefix: str) -> None:
        def options(name: str) -> dict[str, object]:
            return {"bias": False, "quant_config": quant_config, "prefix": f"{prefix}.{name}", "return_bias": False}

        self.wq_a = ReplicatedLinear(config.hidden_size, config.q_lora_rank, **options("wq_a"))
        self.q_norm = Norm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = ColumnParallelLinear(config.q_lora_rank, config.num_attention_heads * config.head_dim, **options("wq_b"))
        self.wkv = ReplicatedLinear(config.hidden_size, config.head_dim, **options("wkv"))
        self.kv_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.wo_a = GroupedOutputProjection(config, quant_config, f"{prefix}.wo_a")
        self.wo_b = RowParallelLinear(config.o_groups * config.o_lora_rank, config.hidden_size, reduce_results=False, **options("wo_b"))
        if tp_size > 1:
            set_out_dtype(self.wo_b, PARTIAL_SUM_DTYPE)

    def _merge_projections(self) -> None:
        compressors = [part.compressor for part in (self, self.indexer) if part is not None and self.compress_ratio]
        self.merged_down = MergedLinear(self.wq_a, self.wkv)
        self.merged_up = MergedLinear(self.wq_b, *([] if self.indexer is None else [self.indexer.wq_b]))
        self.merged_compressors = MergedLinear(*(layer for c in compressors for layer in (c.wkv, c.wgate))) if compressors else None

    def merge_weights(self) -> None:
        """Once the weights are loaded."""
        for merged in (self.merged_down, self.merged_up, self.merged_compressors):
            if merged is not None:
                merged.merge()

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
        metadata = self.window_cache.metadata()
        num_tokens = x.shape[0] if metadata is None else metadata.num_tokens
        # Rows past num_tokens pad the batch of an eager step: they are left out of the attention, and zero.
        out = self._attend(x[:num_tokens], positions[:num_tokens], cos_sin_cache, metadata)
        out = pad(out, (0, 0, 0, 0, 0, x.shape[0] - num_tokens)) if num_tokens < x.shape[0] else out
        out = ops.inverse_rope(out, positions, cos_sin_cache, out=out)
        return sum_over_ranks(self.wo_b(self.wo_a(out).flatten(1))).to(x.dtype)

    def _attend(self, x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, window: WindowMetadata | None) -> torch.Tensor:
        """[T, num_heads, head_dim]; what stands there in a dummy run (``window`` None) does not matter."""
        qr, kv = self.merged_down(x)
        q, *indexer_q = self.merged_up(self.q_norm(qr))
        q = q.unflatten(1, (self.num_heads, self.head_dim))
        topk_indices = None
        if self.merged_compressors is not None:
            compressed = self.merged_compressors(x)
            self.compressor(*compressed[:2], positions, cos_sin_cache)
        if self.indexer is not None:
            topk_indices = self.indexer(x, indexer_q[0], compressed[2:], positions, cos_sin_cache)
        if window is None:
            return torch.zeros_like(_like_normed(q))
        q = ops.norm_rope_insert(
            q, kv, self.kv_norm.weight, positions, cos_sin_cache, self.eps, self.window_cache.kv_cache, window.slot_mapping
        )
        entry_cache, entry_slots = self._entries(topk_indices)
        return ops.sparse_mla(
            q,
            self.window_cache.kv_cache,
            window.window_slots,
            self.attn_sink,
            self.scale,
            entry_cache=entry_cache,
            entry_slots=entry_slots,
        )

    def _entries(self, topk_indices: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The cache of compressed entries, and the slots [T, K] that each token attends to in it."""
        if not self.compress_ratio:
            return None, None
        metadata = self.entry_cache.metadata()
        assert metadata is not None  # a step that has metadata has it for every cache
        slots = metadata.entry_slots
        if topk_indices is not None:
            slots = ops.entry_slots(
                metadata.num_entries,
                metadata.token_to_req,
                metadata.block_table,
                self.entry_cache.kv_cache.shape[1],
                topk_indices=topk_indices,
            )
        return self.entry_cache.kv_cache, slots


def _like_normed(q: torch.Tensor) -> torch.Tensor:
    """Memory of the normed queries, which a dummy run needs too: vLLM measures with it how much is left for the cache."""
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _load_head_slice(parameter: nn.Parameter, loaded: torch.Tensor) -> None:
    size = parameter.shape[0]
    parameter.data.copy_(loaded.narrow(0, get_tensor_model_parallel_rank() * size, size))
