"""DeepSeek-V4 for vLLM: embedding, layers with hyper-connections, head (model.md 3).

Module names are the checkpoint's own tensor names, so that loading needs no table of names (except for the routed experts,
whose weights vLLM stacks).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_dsv4 import ops
from vllm_dsv4.attention.cache import CacheFactory
from vllm_dsv4.attention.compressor import Norm
from vllm_dsv4.attention.layer import Attention
from vllm_dsv4.attention.metadata import Dsv4Metadata, prepare_metadata, reserve_metadata
from vllm_dsv4.compat import (
    LogitsProcessor,
    ParallelLMHead,
    VllmConfig,
    VocabParallelEmbedding,
    current_platform,
    get_forward_context,
)
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.model.loader import load_weights
from vllm_dsv4.model.warm_up import KernelWarmUp
from vllm_dsv4.moe.layer import MoE, SharedExpert
from vllm_dsv4.quantization.config import Dsv4QuantConfig
from vllm_dsv4.reference.rope import build_cos_sin_cache


class Residual(NamedTuple):
    """The residual streams [T, hc_mult, hidden_size], and how a block's output is merged into them (``hc_pre``'s results)."""

    streams: torch.Tensor
    post: torch.Tensor | None = None
    comb: torch.Tensor | None = None


class Dsv4DecoderLayer(nn.Module):
    """One layer: attention and experts, each behind a hyper-connection over the residual streams."""

    hc_attn_fn: torch.Tensor
    hc_attn_scale: torch.Tensor
    hc_attn_base: torch.Tensor
    hc_ffn_fn: torch.Tensor
    hc_ffn_scale: torch.Tensor
    hc_ffn_base: torch.Tensor

    def __init__(self, config: Dsv4Config, layer: int, caches: CacheFactory, quant_config: Dsv4QuantConfig, prefix: str):
        super().__init__()
        self.config = config
        self.attn = Attention(config, layer, caches, quant_config, f"{prefix}.attn")
        self.ffn = MoE(config, layer, quant_config, f"{prefix}.ffn")
        self.attn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        for part in ("attn", "ffn"):
            _register_hyper_connection(self, f"hc_{part}", config.hc_rows, 3, config)

    def forward(
        self, x: torch.Tensor | None, residual: Residual, positions: torch.Tensor, input_ids: torch.Tensor, cos_sin_cache: torch.Tensor
    ) -> tuple[torch.Tensor, Residual]:
        """``x`` [T, hidden_size] is what the block before put out, not yet in the streams; None before the first layer."""
        x, residual = self._connect("attn", self.attn_norm, x, residual)
        x = self.attn(x, positions, cos_sin_cache)
        x, residual = self._connect("ffn", self.ffn_norm, x, residual)
        return self.ffn(x, input_ids), residual

    def _connect(self, block: str, norm: Norm, x: torch.Tensor | None, residual: Residual) -> tuple[torch.Tensor, Residual]:
        """The normed input of ``block``, and the residual with ``x`` merged into its streams."""
        config = self.config
        parameters = [getattr(self, f"hc_{block}_{name}") for name in ("fn", "scale", "base")]
        if x is None:
            x, post, comb = ops.hc_pre(residual.streams, *parameters, config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)
            return norm(x), Residual(residual.streams, post, comb)
        streams, x, post, comb = ops.hc_post_pre(
            x, *residual, *parameters, norm.weight, config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
        )
        return x, Residual(streams, post, comb)


class Dsv4ForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = Dsv4Config.from_hf(vllm_config.model_config.hf_config)
        self.config = config
        quant_config = Dsv4QuantConfig(config.quantization)
        caches = CacheFactory(config, vllm_config)
        self.kernel_warm_up = KernelWarmUp(config, vllm_config, caches)
        start = f"{prefix}." if prefix else ""
        self.embed = VocabParallelEmbedding(config.vocab_size, config.hidden_size, prefix=f"{start}embed")
        self.layers = nn.ModuleList(
            Dsv4DecoderLayer(config, layer, caches, quant_config, f"{start}layers.{layer}") for layer in range(config.num_hidden_layers)
        )
        _register_hyper_connection(self, "hc_head", config.hc_mult, 1, config)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.head = ParallelLMHead(config.vocab_size, config.hidden_size, quant_config=Dsv4QuantConfig(), prefix=f"{start}head")
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.max_model_len = vllm_config.model_config.max_model_len
        self._register_rope(self.max_model_len)

    def _register_rope(self, num_positions: int) -> None:
        """Tables of cosines and sines for every position that the engine can serve; compressed layers have their own."""
        config, rope_dim = self.config, self.config.qk_rope_head_dim
        tables = {
            "cos_sin_cache": build_cos_sin_cache(config.rope_theta, None, rope_dim, num_positions),
            "compress_cos_sin_cache": build_cos_sin_cache(config.compress_rope_theta, config.yarn, rope_dim, num_positions),
        }
        for name, table in tables.items():
            self.register_buffer(name, table.to(current_platform.device_type), persistent=False)

    @property
    def lm_head(self) -> ParallelLMHead:
        """The head under the name by which vLLM looks for it."""
        return self.head

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        # A request can carry any id when the server runs without a tokenizer; one bad request must not end the engine.
        return self.embed(input_ids.clamp(0, self.config.vocab_size - 1))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """``input_ids``, ``positions`` [T] → hidden states [T, hidden_size] before the head."""
        metadata = self._step_metadata()
        prepare_metadata(metadata, positions)
        held = None if metadata else reserve_metadata(positions, self.max_model_len)  # noqa: F841
        embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        x, residual = None, Residual(embedded[:, None].repeat(1, self.config.hc_mult, 1))
        for layer, compress_ratio in zip(self.layers, self.config.compress_ratios, strict=True):
            table = self.compress_cos_sin_cache if compress_ratio else self.cos_sin_cache
            x, residual = layer(x, residual, positions, input_ids, table)
        streams = ops.hc_post(x, *residual)
        x = ops.hc_head(streams, self.hc_head_fn, self.hc_head_scale, self.hc_head_base, self.config.rms_norm_eps, self.config.hc_eps)
        return self.norm(x)

    def _step_metadata(self) -> list[Dsv4Metadata]:
        metadata = get_forward_context().attn_metadata
        return list(metadata.values()) if isinstance(metadata, dict) else []

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.head, hidden_states)

    def process_weights_after_loading(self) -> None:
        """vLLM's hook, also where it makes up weights."""
        for module in self.modules():
            if isinstance(module, Attention | SharedExpert):
                module.merge_weights()
        self.kernel_warm_up.finish()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_weights(self, self.config, weights)


def _register_hyper_connection(module: nn.Module, name: str, rows: int, num_scales: int, config: Dsv4Config) -> None:
    """Add ``NAME_fn`` [rows, hc_mult * hidden_size], ``NAME_base`` [rows] and ``NAME_scale``, all float32 (model.md 3.2)."""
    shapes = {"fn": (rows, config.hc_mult * config.hidden_size), "base": (rows,), "scale": (num_scales,)}
    for suffix, shape in shapes.items():
        parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float32), requires_grad=False)
        module.register_parameter(f"{name}_{suffix}", parameter)
