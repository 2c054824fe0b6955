"""The whole model over one sequence at once, straight from its definition: no cache, no pages, no vLLM (model.md 3 - 5).

``vllm-dsv4 verify`` compares the served model with it. It rounds where the served model rounds, and shares with it the ops
that act on single tokens (norms, hyper-connections, router, activation) and the number formats; attention, compressor,
indexer, linear layers and experts are written here a second time, over whole sequences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm_dsv4.config import ConfigError, Dsv4Config
from vllm_dsv4.quantization.formats import INDEXER_FP8, INDEXER_MXFP4, PACKED_KV, CacheFormat, RowFormat
from vllm_dsv4.reference.dense_attention import DenseAttention
from vllm_dsv4.reference.dense_weights import DenseWeights
from vllm_dsv4.reference.hc_head import hc_head_ref
from vllm_dsv4.reference.hc_post import hc_post_ref
from vllm_dsv4.reference.hc_pre import hc_pre_ref
from vllm_dsv4.reference.rope import build_cos_sin_cache
from vllm_dsv4.reference.router import router_ref
from vllm_dsv4.reference.swiglu import swiglu_ref

_TOKEN_TILE = 512
"""Tokens that pass through everything but attention together."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class DenseModel:
    """DeepSeek-V4 as a function of one token sequence. Scratch memory is bounded: nothing is quadratic in the length."""

    def __init__(self, weights: DenseWeights, kv_format: CacheFormat, indexer_format: CacheFormat):
        """The formats decide how entries and indexer keys are rounded, as if they had been cached."""
        self.config = weights.config
        self.weights = weights
        self.kv_format = kv_format
        self.indexer_format = indexer_format

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, dtype: torch.dtype | None = None, kv_format: str = "auto", indexer_format: str = "auto"
    ) -> DenseModel:
        """Read a checkpoint.

        Args:
            path: folder with ``config.json`` and safetensors files under DeepSeek's own names.
            dtype: of plain weights and of values between layers; default: the configuration's ``torch_dtype``.
            kv_format: of KV entries: "fp8" (584 bytes), "rows" (``dtype``), "bfloat16" (rows of it); "auto" is "fp8" for a
                quantised checkpoint, else "rows".
            indexer_format: of indexer queries and keys: "fp8", "mxfp4" (with the Hadamard rotation) or "rows"; "auto" likewise.

        Raises:
            ConfigError: the configuration or an argument is not implemented.
            CheckpointError: tensors are missing, unexpected, misshapen or of the wrong dtype.
        """
        raw = json.loads((Path(path) / "config.json").read_text())
        config = Dsv4Config.from_hf(raw)
        dtype = dtype or _choose("torch_dtype", raw.get("torch_dtype", "bfloat16"), _DTYPES)
        auto = "rows" if config.quantization is None else "fp8"
        kv_formats = {"fp8": PACKED_KV, "rows": RowFormat(config.head_dim, dtype), "bfloat16": RowFormat(config.head_dim, torch.bfloat16)}
        indexer_formats = {"fp8": INDEXER_FP8, "mxfp4": INDEXER_MXFP4, "rows": RowFormat(config.index_head_dim, dtype)}
        chosen = (
            _choose("kv_format", auto if kv_format == "auto" else kv_format, kv_formats),
            _choose("indexer_format", auto if indexer_format == "auto" else indexer_format, indexer_formats),
        )
        for fmt, size in zip(chosen, (config.head_dim, config.index_head_dim), strict=True):
            if fmt.head_dim != size:
                raise ConfigError(f"{type(fmt).__name__} holds {fmt.head_dim} values, the model's entries have {size}; choose 'rows'")
        return cls(DenseWeights.read(path, config, dtype), *chosen)

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], last: int | None = None) -> torch.Tensor:
        """Logits of what follows each of ``token_ids`` [T], or each of the ``last`` ones → [T or last, V] float32.

        Raises:
            ValueError: there are no tokens, or ids outside of the vocabulary.
        """
        config, ids = self.config, torch.tensor(token_ids, dtype=torch.long)
        if ids.numel() == 0 or ids.min() < 0 or ids.max() >= config.vocab_size:
            raise ValueError(f"token_ids must be one or more ids from 0 to {config.vocab_size - 1}, got {list(token_ids)[:20]}")
        cos_sin = build_cos_sin_cache(config.rope_theta, None, config.qk_rope_head_dim, len(ids))
        compress_cos_sin = build_cos_sin_cache(config.compress_rope_theta, config.yarn, config.qk_rope_head_dim, len(ids))
        streams = self.weights["embed.weight"][ids].unsqueeze(1).repeat(1, config.hc_mult, 1)
        for layer, ratio in enumerate(config.compress_ratios):
            streams = self._layer(layer, streams, ids, compress_cos_sin if ratio else cos_sin)
        return _by_tokens(self._head, streams if last is None else streams[-last:])

    def log_probs(self, token_ids: Sequence[int], last: int | None = None) -> torch.Tensor:
        """As ``forward``, normalised → [T or last, V] float32."""
        return self.forward(token_ids, last).log_softmax(-1)

    def generate_greedy(self, token_ids: Sequence[int], new_tokens: int) -> tuple[list[int], torch.Tensor]:
        """The likeliest continuation: its tokens, and the log-probabilities [new_tokens, V] that each was chosen from.

        Every token costs a pass over the whole sequence.
        """
        sequence, rows = list(token_ids), [torch.empty(0, self.config.vocab_size, dtype=torch.float32)]
        for _ in range(new_tokens):
            rows.append(self.log_probs(sequence, last=1))
            sequence.append(int(rows[-1].argmax()))
        return sequence[len(token_ids) :], torch.cat(rows)

    def _layer(self, layer: int, streams: torch.Tensor, ids: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """streams [T, hc_mult, D], ids [T], cos_sin [T, rope_dim] → streams (model.md 3)."""
        prefix, ratio = f"layers.{layer}.", self.config.compress_ratios[layer]
        attention = DenseAttention(self.weights, f"{prefix}attn.", ratio, cos_sin, self.kv_format, self.indexer_format)
        x, post, comb = _by_tokens(partial(self._enter, prefix, "attn"), streams)
        streams = _by_tokens(hc_post_ref, attention(x), streams, post, comb)
        x, post, comb = _by_tokens(partial(self._enter, prefix, "ffn"), streams)
        out = _by_tokens(partial(self._mixture_of_experts, f"{prefix}ffn.", self.config.is_hash_layer(layer)), x, ids)
        return _by_tokens(hc_post_ref, out, streams, post, comb)

    def _enter(self, prefix: str, block: str, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The normed input of block "attn" or "ffn", and the weights by which its output is merged."""
        config = self.config
        fn, scale, base = (self.weights[f"{prefix}hc_{block}_{part}"] for part in ("fn", "scale", "base"))
        x, post, comb = hc_pre_ref(streams, fn, scale, base, config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)
        return self.weights.norm(f"{prefix}{block}_norm", x), post, comb

    def _head(self, streams: torch.Tensor) -> torch.Tensor:
        fn, scale, base = (self.weights[f"hc_head_{part}"] for part in ("fn", "scale", "base"))
        x = hc_head_ref(streams, fn, scale, base, self.config.rms_norm_eps, self.config.hc_eps)
        return self.weights.linear("head", self.weights.norm("norm", x), torch.float32)

    def _mixture_of_experts(self, prefix: str, is_hash: bool, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, D], ids [T] → [T, D] (model.md 4)."""
        config, table = self.config, "tid2eid" if is_hash else "bias"
        logits = self.weights.linear(f"{prefix}gate", x, torch.float32)
        choice = {table: self.weights[f"{prefix}gate.{table}"], "input_ids": ids}
        weights, experts = router_ref(logits, config.num_experts_per_tok, config.routed_scaling_factor, **choice)
        out = self._expert(f"{prefix}shared_experts", x).double()
        for expert in experts.unique().tolist():
            token, rank = (experts == expert).nonzero(as_tuple=True)
            out.index_add_(0, token, self._expert(f"{prefix}experts.{expert}", x[token], weights[token, rank]).double())
        return out.to(x.dtype)

    def _expert(self, name: str, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = self.weights.linear(f"{name}.w1", x), self.weights.linear(f"{name}.w3", x)
        return self.weights.linear(f"{name}.w2", swiglu_ref(gate, up, self.config.swiglu_limit, x.dtype, weights))


def _by_tokens(function: Callable[..., Any], *rows: torch.Tensor) -> Any:
    """``function(*rows)`` for a function that treats every row alike, some rows at a time; it returns a tensor or a tuple of them."""
    parts = [function(*(tensor[start : start + _TOKEN_TILE] for tensor in rows)) for start in range(0, len(rows[0]), _TOKEN_TILE)]
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))
    return torch.cat(parts)


def _choose(option: str, name: str, choices: dict[str, Any]) -> Any:
    if name not in choices:
        raise ConfigError(f"{option} {name!r} is not implemented; choose one of {sorted(choices)}")
    return choices[name]
