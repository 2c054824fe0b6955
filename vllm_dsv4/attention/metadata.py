"""Per-step metadata of each cache, computed once a step and shared by all layers of a cache group.

Everything is computed on the device from ``query_start_loc``, ``seq_lens`` and ``block_table``: no host synchronisation, and
padded tokens (slot -1) come out with nothing to read or write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm_dsv4 import ops
from vllm_dsv4.compat import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata, VllmConfig


@dataclass
class Dsv4Metadata:
    """T = ``num_tokens`` rows of this step, R requests.

    ``block_table`` [R, num_blocks] int32, ``token_to_req`` [T] int32 and ``slot_mapping`` [T] int64, -1 = nothing to write: the
    token's own slot in a sliding cache; in an entry cache the slot of the entry that the token completes. The optional fields
    are explained at their builders.
    """

    num_tokens: int
    block_table: torch.Tensor
    token_to_req: torch.Tensor
    slot_mapping: torch.Tensor
    window_slots: torch.Tensor | None = None
    num_entries: torch.Tensor | None = None
    entry_slots: torch.Tensor | None = None


class Dsv4MetadataBuilder(AttentionMetadataBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.spec = kv_cache_spec

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Dsv4Metadata:
        common = common_attn_metadata
        num_tokens = common.num_actual_tokens
        query_start_loc = common.query_start_loc[: common.num_reqs + 1]
        token = torch.arange(num_tokens, device=query_start_loc.device, dtype=query_start_loc.dtype)
        # Tokens past the last request are padding; they take the last row, and their slot of -1 masks them below.
        token_to_req = torch.searchsorted(query_start_loc[1:], token, right=True).clamp_(max=common.num_reqs - 1)
        seq_lens = common.seq_lens[: common.num_reqs]
        positions = (seq_lens[token_to_req] - query_start_loc[1:][token_to_req] + token).long()
        metadata = Dsv4Metadata(
            num_tokens=num_tokens,
            block_table=common.block_table_tensor[: common.num_reqs],
            token_to_req=token_to_req.int(),
            slot_mapping=common.slot_mapping[:num_tokens],
        )
        self.complete(metadata, positions, common)
        return metadata

    def complete(self, metadata: Dsv4Metadata, positions: torch.Tensor, common: CommonAttentionMetadata) -> None:
        raise NotImplementedError


class SlidingMetadataBuilder(Dsv4MetadataBuilder):
    """Adds, for the window cache, ``window_slots`` [T, sliding_window] int32: the slots that each token attends to."""

    def complete(self, metadata: Dsv4Metadata, positions: torch.Tensor, common: CommonAttentionMetadata) -> None:
        if not self.is_window_cache:
            return
        slots = ops.window_slots(positions, metadata.token_to_req, metadata.block_table, self.spec.sliding_window, self.spec.block_size)
        metadata.window_slots = slots.masked_fill_((metadata.slot_mapping < 0)[:, None], -1)

    @property
    def is_window_cache(self) -> bool:
        return any(name.endswith("window_cache") for name in self.layer_names)


class EntryMetadataBuilder(Dsv4MetadataBuilder):
    """Adds ``num_entries`` [T] int32, the entries that each token sees, and moves ``slot_mapping`` from tokens to entries.

    For a cache that is attended whole (ratio 128) also ``entry_slots`` [T, K] int32: the slots of all visible entries.
    """

    def complete(self, metadata: Dsv4Metadata, positions: torch.Tensor, common: CommonAttentionMetadata) -> None:
        ratio, page_size = self.spec.tokens_per_state, self.spec.num_states
        is_padding = metadata.slot_mapping < 0
        metadata.num_entries = ((positions + 1) // ratio).masked_fill_(is_padding, 0).int()
        entry = positions // ratio
        page = metadata.block_table[metadata.token_to_req, entry // page_size].long()
        completes = ((positions + 1) % ratio == 0) & ~is_padding
        metadata.slot_mapping = torch.where(completes, page * page_size + entry % page_size, -1)
        if ratio == 128:
            metadata.entry_slots = ops.entry_slots(
                metadata.num_entries, metadata.token_to_req, metadata.block_table, page_size, width=common.max_seq_len // ratio
            )
