"""Per-step metadata of each cache, shared by all layers of a cache group.

A builder only notes vLLM's own tensors, which stay at their addresses from step to step. What the layers need beyond them is
computed on the device by ``prepare_metadata``, at the start of the forward pass: so a CUDA graph that holds the pass holds
this too, for any number of requests, and no step needs host synchronisation or buffers of ours. Padded tokens (slot -1) come
out with nothing to write and no entries to read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm_dsv4 import ops
from vllm_dsv4.compat import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata, VllmConfig


@dataclass
class Dsv4Metadata:
    """T = ``num_tokens`` rows of this step, R requests.

    ``query_start_loc`` [R + 1] int32, ``block_table`` [R, num_blocks] int32 and ``slot_mapping`` [T] int64, -1 = nothing to
    write: the token's own slot in a sliding cache; in an entry cache, once prepared, the slot of the entry that the token
    completes. ``token_to_req`` [T] int32 and the fields of the subclasses are set by ``prepare``.
    """

    num_tokens: int
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    spec: Any

    def prepare(self, positions: torch.Tensor, token_to_req: torch.Tensor) -> None:
        self.token_to_req = token_to_req


@dataclass
class WindowMetadata(Dsv4Metadata):
    """Of a window cache: ``window_slots`` [T, sliding_window] int32, the slots that each token attends to."""

    def prepare(self, positions: torch.Tensor, token_to_req: torch.Tensor) -> None:
        super().prepare(positions, token_to_req)
        self.window_slots = ops.window_slots(positions, token_to_req, self.block_table, self.spec.sliding_window, self.spec.block_size)


@dataclass
class EntryMetadata(Dsv4Metadata):
    """Of compressed entries: ``num_entries`` [T] int32, those that each token sees.

    For a cache that is attended whole (ratio 128) also ``entry_slots`` [T, ``max_entries``] int32: the slots of all visible
    entries.
    """

    max_entries: int
    entry_slots: torch.Tensor | None = None

    def prepare(self, positions: torch.Tensor, token_to_req: torch.Tensor) -> None:
        super().prepare(positions, token_to_req)
        ratio, page_size = self.spec.tokens_per_state, self.spec.num_states
        self.num_entries, self.slot_mapping = ops.completed_entries(
            positions, self.slot_mapping, token_to_req, self.block_table, ratio, page_size
        )
        if ratio == 128:
            self.entry_slots = ops.entry_slots(self.num_entries, token_to_req, self.block_table, page_size, width=self.max_entries)


def prepare_metadata(metadata: Iterable[Dsv4Metadata], positions: torch.Tensor) -> None:
    """Complete the metadata of every cache group of a step; ``positions`` [T] int64."""
    token_to_req: torch.Tensor | None = None
    for group in {id(group): group for group in metadata}.values():
        if token_to_req is None:
            token_to_req = ops.token_to_req(group.query_start_loc, group.num_tokens)
        group.prepare(positions[: group.num_tokens], token_to_req)


def reserve_metadata(positions: torch.Tensor, max_model_len: int) -> torch.Tensor:
    """What ``prepare_metadata`` holds for a whole step at worst: a dummy run, which has no metadata, measures memory with it."""
    return torch.empty(positions.shape[0], max_model_len // 128, dtype=torch.int32, device=positions.device)


class Dsv4MetadataBuilder(AttentionMetadataBuilder):
    # Graphs may hold any batch: kernels read all that changes from device tensors.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    reorder_batch_threshold = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.spec = kv_cache_spec
        self.max_model_len = vllm_config.model_config.max_model_len
        self.max_graph_tokens = vllm_config.compilation_config.max_cudagraph_capture_size or 0

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Dsv4Metadata:
        common = common_attn_metadata
        return self.make(
            common,
            num_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc[: common.num_reqs + 1],
            block_table=common.block_table_tensor[: common.num_reqs],
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
            spec=self.spec,
        )

    def make(self, common: CommonAttentionMetadata, **fields: Any) -> Dsv4Metadata:
        raise NotImplementedError


class SlidingMetadataBuilder(Dsv4MetadataBuilder):
    """Of window caches and of compressor states."""

    def make(self, common: CommonAttentionMetadata, **fields: Any) -> Dsv4Metadata:
        is_window = any(name.endswith("window_cache") for name in self.layer_names)
        return WindowMetadata(**fields) if is_window else Dsv4Metadata(**fields)


class EntryMetadataBuilder(Dsv4MetadataBuilder):
    def make(self, common: CommonAttentionMetadata, **fields: Any) -> Dsv4Metadata:
        # A graph is captured with short requests, and must serve any.
        longest = self.max_model_len if common.num_actual_tokens <= self.max_graph_tokens else common.max_seq_len
        return EntryMetadata(max_entries=longest // self.spec.tokens_per_state, **fields)
