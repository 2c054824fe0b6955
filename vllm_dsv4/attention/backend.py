"""Attention backends: what vLLM needs to know to page our caches. The layers call the ops themselves."""

from __future__ import annotations

from typing import Any

from vllm_dsv4.attention.metadata import Dsv4MetadataBuilder, EntryMetadataBuilder, SlidingMetadataBuilder
from vllm_dsv4.compat import AttentionBackend, KVCacheLayout, KVCacheSpec, MultipleOf
from vllm_dsv4.quantization.formats import BLOCK_SIZE


class Dsv4AttentionBackend(AttentionBackend):
    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the model's layers call the ops directly")

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Pages of different sizes share a block, so blocks must be outermost.
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)


class EntryBackend(Dsv4AttentionBackend):
    """Caches with one entry for several tokens: compressed KV and indexer keys."""

    @staticmethod
    def get_name() -> str:
        return "DSV4_ENTRIES"

    @staticmethod
    def get_builder_cls() -> type[Dsv4MetadataBuilder]:
        return EntryMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        # With a spec: its own size, since a padded page cannot be split.
        return [BLOCK_SIZE if kv_cache_spec is None else kv_cache_spec.block_size]


class SlidingBackend(Dsv4AttentionBackend):
    """Caches with one entry a token of which only the latest are kept: window KV and compressor state."""

    @staticmethod
    def get_name() -> str:
        return "DSV4_SLIDING"

    @staticmethod
    def get_builder_cls() -> type[Dsv4MetadataBuilder]:
        return SlidingMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1) if kv_cache_spec is None else kv_cache_spec.block_size]
