"""The compressor: pools windows of tokens into single entries (model.md 3.5)."""

from __future__ import annotations

import torch
from torch import nn

from vllm_dsv4 import ops
from vllm_dsv4.attention.cache import CacheFactory, CacheLayer
from vllm_dsv4.compat import ReplicatedLinear
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.quantization.config import Dsv4QuantConfig
from vllm_dsv4.quantization.formats import CompressorStateFormat
from vllm_dsv4.quantization.linear import set_out_dtype


class Norm(nn.Module):
    """RMSNorm with a weight in the model's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class Compressor(nn.Module):
    """Writes this step's rows into the state cache, then every entry that one of its tokens completes into ``cache``.

    ``entry_dim`` is the width of an entry; a ratio-4 compressor projects to twice that, one half for a token's own window and
    one for the next.
    """

    def __init__(self, config: Dsv4Config, caches: CacheFactory, compress_ratio: int, entry_dim: int, cache: CacheLayer, prefix: str):
        super().__init__()
        self.compress_ratio = compress_ratio
        state = CompressorStateFormat(entry_dim, compress_ratio)
        self.wkv = self._projection(config.hidden_size, state.width, f"{prefix}.wkv")
        self.wgate = self._projection(config.hidden_size, state.width, f"{prefix}.wgate")
        self.ape = nn.Parameter(torch.zeros(compress_ratio, state.width, dtype=torch.float32), requires_grad=False)
        self.norm = Norm(entry_dim, config.rms_norm_eps)
        self.state_cache = caches.compressor_state(f"{prefix}.state_cache", state)
        # A tuple hides the cache from nn.Module: it belongs to the layer, and must not be registered twice.
        self._entry_cache = (cache,)

    @staticmethod
    def _projection(hidden_size: int, width: int, prefix: str) -> ReplicatedLinear:
        layer = ReplicatedLinear(hidden_size, width, bias=False, quant_config=Dsv4QuantConfig(), prefix=prefix, return_bias=False)
        set_out_dtype(layer, torch.float32)
        return layer

    def forward(self, kv: torch.Tensor, gate: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
        """``kv`` and ``gate`` [T, width] float32: the layer's normed input through ``wkv`` and ``wgate``; ``positions`` [T]."""
        state, entries = self.state_cache.metadata(), self._entry_cache[0].metadata()
        if state is None or entries is None:
            return
        # All rows of the step first: a window may span rows that this step writes.
        ops.compressor_store(kv, gate, self.ape, positions, self.state_cache.kv_cache, state.slot_mapping)
        ops.compress_insert(
            self.state_cache.kv_cache,
            state.block_table,
            state.token_to_req,
            positions,
            self.norm.weight,
            self.norm.eps,
            cos_sin_cache,
            self._entry_cache[0].kv_cache,
            entries.slot_mapping,
            self.compress_ratio,
        )
