"""Attention of one layer over a whole sequence: every key at once, and masks that say who sees what (model.md 3.4 - 3.7)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dsv4.quantization.formats import CacheFormat, IndexerMXFP4Format
from vllm_dsv4.reference.dense_weights import DenseWeights
from vllm_dsv4.reference.numerics import hadamard, rms_normalize, round_trip_entries
from vllm_dsv4.reference.rope import apply_rope

_SCRATCH_ELEMENTS = 1 << 23
"""Float64 values that one tile of queries may take: its scores, of attention and indexer heads, for every key."""
_MIN_TILE = 64
"""Queries in a tile however small the window is, unless scratch memory is short."""


@dataclass(frozen=True)
class DenseAttention:
    """``attn`` of the layer whose tensors' names begin with ``prefix``.

    ``cos_sin`` [T, rope_dim] float32 is the layer's RoPE table; the formats say how keys are rounded when they are cached.
    """

    weights: DenseWeights
    prefix: str
    compress_ratio: int
    cos_sin: torch.Tensor
    kv_format: CacheFormat
    indexer_format: CacheFormat

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], normed → [T, hidden_size]."""
        window = self._window_kv(x)
        entries = keys = None
        if self.compress_ratio:
            entries = self._compress("compressor", x, self.weights.config.head_dim, self.kv_format)
        if self.compress_ratio == 4:
            keys = self._compress("indexer.compressor", x, self.weights.config.index_head_dim, self.indexer_format)
        config, num_tokens = self.weights.config, len(x)
        heads = max(config.num_attention_heads, config.index_n_heads if keys is not None else 0)
        num_keys = config.sliding_window + (0 if entries is None else len(entries))
        step = max(1, _SCRATCH_ELEMENTS // (heads * (num_keys + config.head_dim)))
        # A tile also holds its own tokens' keys: in one much longer than the window, the mask would hide most of them.
        step = min(step, max(config.sliding_window, _MIN_TILE))
        tiles = (slice(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step))
        return torch.cat([self._attend(x, tile, window, entries, keys) for tile in tiles])

    def _window_kv(self, x: torch.Tensor) -> torch.Tensor:
        """Every token's own key and value, as the window's cache returns it → [T, d] float32."""
        normed = self._normalize(self.weights.linear(f"{self.prefix}wkv", x), f"{self.prefix}kv_norm.weight", self.kv_format)
        return round_trip_entries(apply_rope(normed.double(), self.cos_sin).to(self.kv_format.value_dtype), self.kv_format)

    def _normalize(self, x: torch.Tensor, weight: str, fmt: CacheFormat) -> torch.Tensor:
        return (rms_normalize(x.double(), self.weights.config.rms_norm_eps) * self.weights[weight].double()).to(fmt.value_dtype)

    def _compress(self, name: str, x: torch.Tensor, size: int, fmt: CacheFormat) -> torch.Tensor:
        """Entries of all complete windows, as their cache returns them: x [T, hidden_size] → [T // r, size] float32 (3.5)."""
        r, prefix = self.compress_ratio, f"{self.prefix}{name}."
        complete = x[: len(x) // r * r]
        kv = self.weights.linear(f"{prefix}wkv", complete, torch.float32).unflatten(0, (-1, r))  # [windows, r, projected]
        gate = self.weights.linear(f"{prefix}wgate", complete, torch.float32).unflatten(0, (-1, r)) + self.weights[f"{prefix}ape"]
        if r == 4:
            kv, gate = _overlap(kv, size, 0.0), _overlap(gate, size, -torch.inf)
        pooled = (gate.double().softmax(1) * kv.double()).sum(1).float()
        normed = self._normalize(pooled.to(fmt.value_dtype), f"{prefix}norm.weight", fmt)
        entries = apply_rope(normed.double(), self.cos_sin[: len(complete) : r]).to(fmt.value_dtype)
        return _index_round_trip(entries, fmt)

    def _attend(
        self, x: torch.Tensor, tile: slice, window: torch.Tensor, entries: torch.Tensor | None, keys: torch.Tensor | None
    ) -> torch.Tensor:
        """The layer's output for a tile of queries → [len(tile), hidden_size]."""
        config, weights = self.weights.config, self.weights
        qr = weights.norm(f"{self.prefix}q_norm", weights.linear(f"{self.prefix}wq_a", x[tile]))
        q = weights.linear(f"{self.prefix}wq_b", qr).unflatten(-1, (config.num_attention_heads, config.head_dim))
        cos_sin = self.cos_sin[tile].unsqueeze(1)
        q = apply_rope(rms_normalize(q.double(), config.rms_norm_eps), cos_sin).to(weights.dtype)

        position = torch.arange(tile.start, tile.stop).unsqueeze(1)
        first = max(0, tile.start - config.sliding_window + 1)
        token = torch.arange(first, tile.stop)
        attended, kv = (token <= position) & (token > position - config.sliding_window), window[first : tile.stop]
        if entries is not None:
            visible = torch.arange(len(entries)) < (position + 1) // self.compress_ratio
            if keys is not None:
                visible = self._select(x[tile], qr, cos_sin, keys, visible)
            seen = visible.any(0)
            attended, kv = torch.cat((attended, visible[:, seen]), 1), torch.cat((kv, entries[seen]))
        return self._project(_softmax_average(q, kv, attended, weights[f"{self.prefix}attn_sink"]), cos_sin)

    def _select(self, x: torch.Tensor, qr: torch.Tensor, cos_sin: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Narrow ``visible`` [queries, entries] to the best ``index_topk`` of each query (3.6); among equals the first win."""
        config, weights, prefix = self.weights.config, self.weights, f"{self.prefix}indexer."
        if len(keys) <= config.index_topk:
            return visible
        q = weights.linear(f"{prefix}wq_b", qr).unflatten(-1, (config.index_n_heads, config.index_head_dim))
        q = _index_round_trip(apply_rope(q.double(), cos_sin).to(weights.dtype), self.indexer_format)
        head_weights = weights.linear(f"{prefix}weights_proj", x).float() * config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        products = (q.double() @ keys.double().T).relu_()  # [queries, heads, entries]
        scores = (head_weights.double().unsqueeze(1) @ products).squeeze(1).float().masked_fill_(~visible, -torch.inf)
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : config.index_topk]
        return visible & torch.zeros_like(visible).scatter_(1, best, True)

    def _project(self, out: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Rotate back [T, heads, d], then the two halves of the output projection, the first a matrix a group of heads."""
        config, weights = self.weights.config, self.weights
        out = apply_rope(out.to(weights.dtype).double(), cos_sin, inverse=True).to(weights.dtype)
        groups = out.flatten(1).unflatten(1, (config.o_groups, -1))
        # The first half is not quantised, even where its weight is stored so (model.md 5.1).
        wo_a = weights.widened(f"{self.prefix}wo_a", torch.float32).to(weights.dtype).unflatten(0, (config.o_groups, -1))
        hidden = torch.stack([x.double() @ weight.double().T for x, weight in zip(groups.unbind(1), wo_a, strict=True)], 1)
        return weights.linear(f"{self.prefix}wo_b", hidden.to(weights.dtype).flatten(1))


def _overlap(rows: torch.Tensor, size: int, absent: float) -> torch.Tensor:
    """What a window of ratio 4 pools: first halves of the window before it, then its own second halves (model.md 3.5).

    rows [windows, 4, 2 size] → [windows, 8, size]; ``absent`` stands for the window before the first.
    """
    before = torch.cat((torch.full_like(rows[:1], absent), rows[:-1]))
    return torch.cat((before[..., :size], rows[..., size:]), 1)


def _index_round_trip(x: torch.Tensor, fmt: CacheFormat) -> torch.Tensor:
    """Entries, or indexer queries [..., size], as they come back from their format → float32."""
    if isinstance(fmt, IndexerMXFP4Format):
        x = hadamard(x.double()).to(x.dtype)
    return round_trip_entries(x.reshape(-1, x.shape[-1]), fmt).view(x.shape)


def _softmax_average(q: torch.Tensor, kv: torch.Tensor, attended: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """q [T, H, d], kv [K, d], attended [T, K], sink [H] → float64 [T, H, d] (model.md 3.4)."""
    q, kv = q.double(), kv.double()
    scores = (q @ kv.T * q.shape[-1] ** -0.5).masked_fill_(~attended.unsqueeze(1), -torch.inf)
    highest = torch.maximum(scores.amax(-1), sink.double()).unsqueeze(-1)
    weights = (scores - highest).exp_()
    total = weights.sum(-1, keepdim=True) + (sink.double().unsqueeze(-1) - highest).exp()
    return weights @ kv / total
