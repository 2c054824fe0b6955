"""The indexer: chooses which ratio-4 entries each token attends to (model.md 3.6)."""

from __future__ import annotations

import torch
from torch import nn

from vllm_dsv4 import ops
from vllm_dsv4.attention.cache import CacheFactory
from vllm_dsv4.attention.compressor import Compressor
from vllm_dsv4.compat import ReplicatedLinear
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.quantization.config import Dsv4QuantConfig
from vllm_dsv4.reference.indexer_topk import SCORE_BYTES


class Indexer(nn.Module):
    """Scores all visible entries with small heads of its own; the same on every rank."""

    def __init__(self, config: Dsv4Config, caches: CacheFactory, compress_ratio: int, quant_config: Dsv4QuantConfig, prefix: str):
        super().__init__()
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.format = caches.indexer_format
        self.max_entries = caches.max_model_len // compress_ratio
        self.wq_b = ReplicatedLinear(
            config.q_lora_rank,
            self.num_heads * self.head_dim,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wq_b",
            return_bias=False,
        )
        self.weights_proj = ReplicatedLinear(
            config.hidden_size,
            self.num_heads,
            bias=False,
            quant_config=Dsv4QuantConfig(),
            prefix=f"{prefix}.weights_proj",
            return_bias=False,
        )
        self.key_cache = caches.indexer_keys(f"{prefix}.key_cache", compress_ratio)
        self.compressor = Compressor(config, caches, compress_ratio, self.head_dim, self.key_cache, f"{prefix}.compressor")

    def forward(
        self,
        x: torch.Tensor,
        q: torch.Tensor,
        compressed: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
    ) -> torch.Tensor | None:
        """→ ``topk_indices`` [T, topk] int32; None in a dummy run.

        ``x`` [T, hidden_size], the layer's normed input; ``q`` [T, num_heads * head_dim], from ``wq_b``; ``compressed``, what
        the compressor takes.
        """
        self.compressor(*compressed, positions, cos_sin_cache)
        q = q.unflatten(1, (self.num_heads, self.head_dim))
        query = ops.indexer_query(q, self.weights_proj(x), positions, cos_sin_cache, self.format)
        keys = self.key_cache.metadata()
        if keys is None:
            self._reserve_scores(x)
            return None
        return ops.indexer_topk(query, self.key_cache.kv_cache, keys.block_table, keys.token_to_req, keys.num_entries, self.topk)

    def _reserve_scores(self, x: torch.Tensor) -> None:
        """Hold for a moment what ``indexer_topk`` may: a dummy run measures memory with it."""
        torch.empty(min(SCORE_BYTES, 4 * x.shape[0] * self.max_entries), dtype=torch.uint8, device=x.device)
