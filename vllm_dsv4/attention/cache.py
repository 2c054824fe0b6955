"""The seven caches of the model, as vLLM cache layers.

vLLM finds them through its static forward context, allocates pages by their specs, and gives each a metadata builder and a
view of its pages. All per-request state lives here, so that preemption, prefix hits and aborts need no code of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_dsv4.attention.backend import Dsv4AttentionBackend, EntryBackend, SlidingBackend
from vllm_dsv4.compat import (
    AttentionLayerBase,
    KVCacheSpec,
    VllmConfig,
    get_current_vllm_config,
    get_forward_context,
    make_entry_spec,
    make_sliding_spec,
)
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.engine_options import indexer_format, kv_cache_dtype
from vllm_dsv4.quantization.formats import (
    BLOCK_SIZE,
    INDEXER_FP8,
    INDEXER_MXFP4,
    PACKED_KV,
    STATE_BLOCK_SIZE,
    WINDOW_BLOCK_SIZE,
    CompressorStateFormat,
)


class CacheLayer(nn.Module, AttentionLayerBase):
    """One cache of one layer; ``kv_cache`` [num_pages, page_size, entry] once vLLM has bound it."""

    def __init__(self, prefix: str, spec: KVCacheSpec, backend: type[Dsv4AttentionBackend]):
        super().__init__()
        self.prefix = prefix
        self.spec = spec
        self.backend = backend
        self.kv_cache = torch.tensor([])
        context = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in context:
            raise ValueError(f"duplicate cache layer name {prefix!r}")
        context[prefix] = self

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return self.spec

    def get_attn_backend(self) -> type[Dsv4AttentionBackend]:
        return self.backend

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the view [num_pages, 1, page_size, entry] of this cache's pages, once its geometry is what our ops read.

        Raises:
            ValueError: another shape, dtype or stride, with both geometries.
        """
        entry = self.spec.state_content_bytes or self.spec.head_size
        expected = (1, self.spec.num_states, entry)
        page = self.spec.num_states * entry
        if kv_cache.dtype != self.spec.dtype or tuple(kv_cache.shape[1:]) != expected or kv_cache.stride()[2:] != (entry, 1):
            raise ValueError(
                f"cache {self.prefix!r}: expected pages {expected} of {self.spec.dtype} with strides (…, {entry}, 1), got "
                f"{tuple(kv_cache.shape[1:])} of {kv_cache.dtype} with strides {kv_cache.stride()[1:]}; is this vLLM supported?"
            )
        if kv_cache.shape[0] > 1 and kv_cache.stride(0) < page:
            raise ValueError(f"cache {self.prefix!r}: pages of {page} elements overlap, their stride is {kv_cache.stride(0)}")
        self.kv_cache = kv_cache.squeeze(1)

    def metadata(self) -> Any:
        """This step's ``Dsv4Metadata``; None in profiling and dummy runs, which have no requests."""
        metadata = get_forward_context().attn_metadata
        return metadata[self.prefix] if isinstance(metadata, dict) else None


class CacheFactory:
    """Makes a layer's caches in the formats that the engine's options and the checkpoint ask for."""

    def __init__(self, config: Dsv4Config, vllm_config: VllmConfig):
        self.config = config
        self.indexer_format = indexer_format(vllm_config.attention_config.indexer_kv_dtype, config)
        self.max_model_len = vllm_config.model_config.max_model_len
        self.model_dtype = vllm_config.model_config.dtype
        self.kv_dtype = kv_cache_dtype(vllm_config.cache_config.cache_dtype, self.model_dtype, config)

    def window(self, prefix: str) -> CacheLayer:
        """KV of the last ``sliding_window`` tokens."""
        packed = self.kv_dtype == torch.uint8
        entry = PACKED_KV.entry_bytes if packed else self.config.head_dim
        spec = make_sliding_spec(WINDOW_BLOCK_SIZE, self.config.sliding_window, entry, self.kv_dtype, packed)
        return CacheLayer(prefix, spec, SlidingBackend)

    def entries(self, prefix: str, compress_ratio: int) -> CacheLayer:
        """Compressed KV: one entry for ``compress_ratio`` tokens."""
        packed = self.kv_dtype == torch.uint8
        entry = PACKED_KV.entry_bytes if packed else self.config.head_dim
        spec = make_entry_spec(BLOCK_SIZE, compress_ratio, entry, self.kv_dtype, packed, kv_entry=packed)
        return CacheLayer(prefix, spec, EntryBackend)

    def indexer_keys(self, prefix: str, compress_ratio: int) -> CacheLayer:
        packed_bytes = {"fp8": INDEXER_FP8.entry_bytes, "mxfp4": INDEXER_MXFP4.entry_bytes}
        packed = self.indexer_format != "rows"
        entry = packed_bytes[self.indexer_format] if packed else self.config.index_head_dim
        dtype = torch.uint8 if packed else self.model_dtype
        return CacheLayer(prefix, make_entry_spec(BLOCK_SIZE, compress_ratio, entry, dtype, packed, kv_entry=False), EntryBackend)

    def compressor_state(self, prefix: str, state: CompressorStateFormat) -> CacheLayer:
        """The projected rows of the tokens that entries still to come are pooled from."""
        block_size = STATE_BLOCK_SIZE[state.compress_ratio]
        return CacheLayer(prefix, make_sliding_spec(block_size, state.window, state.row_dim, torch.float32, packed=False), SlidingBackend)
