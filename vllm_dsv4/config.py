"""One normalised view of a DeepSeek-V4 configuration.

The HF configuration of this model has two shapes in the wild: the raw ``config.json`` keys (kept as they are by vLLM 0.32's
own config class) and the class of ``transformers`` (used by vLLM 0.33), which consumes ``compress_ratios`` and
``num_hash_layers`` and exposes ``layer_types``, ``mlp_layer_types`` and nested ``rope_parameters`` instead. ``Dsv4Config``
is the only reader of either; everything else in this package reads ``Dsv4Config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED_COMPRESS_RATIOS = (0, 4, 128)
_LAYER_TYPE_TO_RATIO = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
# Settings with one known value: the checkpoints have no other, and nothing here implements another.
_FIXED = {
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


class ConfigError(ValueError):
    """The checkpoint's configuration asks for something this package does not implement."""


@dataclass(frozen=True)
class YarnScaling:
    """YaRN parameters of the compressed layers' RoPE (model.md 3.3). There is no magnitude factor."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class QuantizationFormat:
    """How a checkpoint stores its linear layers and its routed experts (model.md 2.1, 2.2)."""

    weight_block_size: tuple[int, int]
    experts: str
    """``"mxfp4"`` (packed E2M1 with one E8M0 scale for 32 columns) or ``"fp8"`` (block FP8, as the linear layers)."""


@dataclass(frozen=True)
class Dsv4Config:
    """DeepSeek-V4 hyper-parameters; names are those of the HF configuration wherever it has one.

    ``compress_ratios`` has exactly ``num_hidden_layers`` items, each 0, 4 or 128. ``quantization`` is None for an unquantised
    checkpoint. ``yarn`` is None when the checkpoint has no RoPE scaling; it only applies to layers with a ratio of 4 or 128.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnScaling | None
    max_position_embeddings: int
    num_nextn_predict_layers: int
    quantization: QuantizationFormat | None

    @property
    def qk_nope_head_dim(self) -> int:
        return self.head_dim - self.qk_rope_head_dim

    @property
    def heads_per_group(self) -> int:
        """Attention heads that share one group of the output projection ``wo_a``."""
        return self.num_attention_heads // self.o_groups

    @property
    def hc_rows(self) -> int:
        """Rows of a hyper-connection's ``fn``: pre and post weights of each stream, and the mixing matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    def is_hash_layer(self, layer: int) -> bool:
        """Whether the layer's experts are chosen by token id rather than by the gate's scores."""
        return layer < self.num_hash_layers

    @classmethod
    def from_json(cls, path: str | Path) -> Dsv4Config:
        """Read ``config.json``, given its path or its folder."""
        path = Path(path)
        return cls.from_hf(json.loads((path / "config.json" if path.is_dir() else path).read_text()))

    @classmethod
    def from_hf(cls, hf_config: Any) -> Dsv4Config:
        """Normalise a raw ``config.json`` dict, vLLM 0.32's config object or transformers' ``DeepseekV4Config``.

        Raises:
            ConfigError: a key is missing, or has a value that is not implemented; the message names key and value.
        """
        read = _Reader(hf_config)
        _reject_unsupported(read)
        num_layers = read.int("num_hidden_layers")
        config = cls(
            vocab_size=read.int("vocab_size"),
            hidden_size=read.int("hidden_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=read.int("num_attention_heads"),
            head_dim=read.int("head_dim"),
            qk_rope_head_dim=_rope_head_dim(read),
            q_lora_rank=read.int("q_lora_rank"),
            o_groups=read.int("o_groups"),
            o_lora_rank=read.int("o_lora_rank"),
            sliding_window=read.int("sliding_window"),
            compress_ratios=_compress_ratios(read, num_layers),
            index_n_heads=read.int("index_n_heads"),
            index_head_dim=read.int("index_head_dim"),
            index_topk=read.int("index_topk"),
            n_routed_experts=read.int("n_routed_experts"),
            num_experts_per_tok=read.int("num_experts_per_tok"),
            n_shared_experts=read.int("n_shared_experts", 1),
            moe_intermediate_size=read.int("moe_intermediate_size"),
            num_hash_layers=_num_hash_layers(read, num_layers),
            routed_scaling_factor=read.float("routed_scaling_factor", 1.0),
            swiglu_limit=read.float("swiglu_limit", 0.0),
            hc_mult=read.int("hc_mult"),
            hc_sinkhorn_iters=read.int("hc_sinkhorn_iters"),
            hc_eps=read.float("hc_eps"),
            rms_norm_eps=read.float("rms_norm_eps"),
            rope_theta=_rope_theta(read),
            compress_rope_theta=_compress_rope_theta(read),
            yarn=_yarn(read),
            max_position_embeddings=read.int("max_position_embeddings"),
            num_nextn_predict_layers=read.int("num_nextn_predict_layers", 0),
            quantization=_quantization(read),
        )
        config._check_shapes()
        return config

    def _check_shapes(self) -> None:
        def require(condition: bool, message: str) -> None:
            if not condition:
                raise ConfigError(message)

        require(
            self.num_attention_heads % self.o_groups == 0,
            f"num_attention_heads ({self.num_attention_heads}) must be a multiple of o_groups ({self.o_groups})",
        )
        for name, head_dim in (("head_dim", self.head_dim), ("index_head_dim", self.index_head_dim)):
            require(
                0 < self.qk_rope_head_dim <= head_dim and self.qk_rope_head_dim % 2 == 0,
                f"the rotated dimension ({self.qk_rope_head_dim}) must be even and at most {name} ({head_dim})",
            )
        require(
            self.num_experts_per_tok <= self.n_routed_experts,
            f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds n_routed_experts ({self.n_routed_experts})",
        )
        require(self.n_shared_experts >= 1, "n_shared_experts must be at least 1, got 0")
        if self.quantization is not None:
            self._check_quantized_shapes(require)

    def _check_quantized_shapes(self, require: Any) -> None:
        for name, expected in (("head_dim", 512), ("qk_rope_head_dim", 64), ("index_head_dim", 128)):
            value = getattr(self, name)
            require(value == expected, f"a quantised checkpoint needs {name} = {expected} (its cache layout), got {value}")
        sizes = {
            "hidden_size": self.hidden_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "q_lora_rank": self.q_lora_rank,
            "o_lora_rank": self.o_lora_rank,
        }
        for name, value in sizes.items():
            require(value % 128 == 0, f"a quantised checkpoint needs {name} to be a multiple of 128, got {value}")


class _Reader:
    """Reads keys from a dict or attributes from a config object, and names what is missing."""

    def __init__(self, hf_config: Any):
        self._source = hf_config

    def get(self, key: str, default: Any = None) -> Any:
        if isinstance(self._source, Mapping):
            return self._source.get(key, default)
        return getattr(self._source, key, default)

    def _number(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"the model's config.json has no {key!r}; is this a DeepSeek-V4 checkpoint?")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{key} in config.json must be a number, got {value!r}")
        return value

    def int(self, key: str, default: int | None = None) -> int:
        value = self._number(key, default)
        if value != int(value) or value < 0:
            raise ConfigError(f"{key} in config.json must be a whole number, got {value!r}")
        return int(value)

    def float(self, key: str, default: float | None = None) -> float:
        return float(self._number(key, default))


def _reject_unsupported(read: _Reader) -> None:
    for key, expected in _FIXED.items():
        value = read.get(key)
        if value is not None and value != expected:
            raise ConfigError(f"{key} = {value!r} is not implemented; DeepSeek-V4 checkpoints have {expected!r}")
    if (read.get("vision_n_layers") or 0) > 0:
        raise ConfigError(
            f"vision checkpoints (vision_n_layers = {read.get('vision_n_layers')}) are not implemented; serve a text-only DeepSeek-V4, "
            "or set VLLM_DSV4_DISABLE=1 to leave this one to vLLM's own model"
        )


def _compress_ratios(read: _Reader, num_layers: int) -> tuple[int, ...]:
    ratios = read.get("compress_ratios")
    if ratios is None:
        layer_types = read.get("layer_types")
        if layer_types is None:
            raise ConfigError("config.json has neither compress_ratios nor layer_types; one is needed, since no pattern is implied")
        rates = read.get("compress_rates") or {}
        unknown = sorted(set(layer_types) - set(_LAYER_TYPE_TO_RATIO))
        if unknown:
            raise ConfigError(f"layer_types {unknown} are not implemented; known are {sorted(_LAYER_TYPE_TO_RATIO)}")
        ratios = [rates.get(kind, ratio) if (ratio := _LAYER_TYPE_TO_RATIO[kind]) else 0 for kind in layer_types]
    # The list may go on past the backbone: draft layers, all of ratio 0.
    if len(ratios) < num_layers:
        raise ConfigError(f"compress_ratios has {len(ratios)} items, fewer than num_hidden_layers = {num_layers}")
    for layer, ratio in enumerate(ratios[:num_layers]):
        if ratio not in SUPPORTED_COMPRESS_RATIOS:
            raise ConfigError(f"compress ratio {ratio} of layer {layer} is not implemented; known are {SUPPORTED_COMPRESS_RATIOS}")
    return tuple(int(ratio) for ratio in ratios[:num_layers])


def _num_hash_layers(read: _Reader, num_layers: int) -> int:
    if read.get("num_hash_layers") is not None:
        return min(read.int("num_hash_layers"), num_layers)
    kinds = read.get("mlp_layer_types")
    if kinds is None:
        raise ConfigError("config.json has neither num_hash_layers nor mlp_layer_types")
    count = sum(kind == "hash_moe" for kind in kinds)
    if any(kind == "hash_moe" for kind in kinds[count:]):
        raise ConfigError(f"hash-routed layers must come first, got mlp_layer_types = {list(kinds)}")
    return count


def _rope_head_dim(read: _Reader) -> int:
    if read.get("qk_rope_head_dim") is not None:
        return read.int("qk_rope_head_dim")
    return int(read.int("head_dim") * read.float("partial_rotary_factor"))


def _rope_parameters(read: _Reader, kind: str) -> Mapping[str, Any]:
    """RoPE settings of ``main`` (ratio 0) or ``compress`` layers; flat settings belong to the compressed layers."""
    nested = read.get("rope_parameters") or read.get("rope_scaling") or {}
    if isinstance(nested.get("main"), Mapping) and isinstance(nested.get("compress"), Mapping):
        return nested[kind]
    return nested if kind == "compress" else {}


def _rope_theta(read: _Reader) -> float:
    return float(_rope_parameters(read, "main").get("rope_theta") or read.float("rope_theta"))


def _compress_rope_theta(read: _Reader) -> float:
    # Flat settings may carry the main theta (transformers writes it there), so only a nested one may answer.
    nested = read.get("rope_parameters") or {}
    if isinstance(nested.get("compress"), Mapping) and nested["compress"].get("rope_theta"):
        return float(nested["compress"]["rope_theta"])
    return read.float("compress_rope_theta")


def _yarn(read: _Reader) -> YarnScaling | None:
    parameters = _rope_parameters(read, "compress")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"RoPE scaling {kind!r} is not implemented; DeepSeek-V4 checkpoints have 'yarn'")
    if parameters.get("attention_factor") not in (None, 1, 1.0) or parameters.get("mscale") or parameters.get("mscale_all_dim"):
        raise ConfigError(f"RoPE magnitude factors are not implemented, got {dict(parameters)}")
    missing = [key for key in ("factor", "original_max_position_embeddings") if parameters.get(key) is None]
    if missing:
        raise ConfigError(f"YaRN scaling needs {' and '.join(missing)}, got {dict(parameters)}")
    return YarnScaling(
        factor=float(parameters["factor"]),
        original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
    )


def _quantization(read: _Reader) -> QuantizationFormat | None:
    quantization = read.get("quantization_config")
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        quantization = quantization.to_dict()
    method = quantization.get("quant_method")
    # vLLM's in-tree hook renames the method; a config that went through it must still be read.
    if method not in ("fp8", "deepseek_v4_fp8") or quantization.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(
            f"quantization {method!r} (fmt {quantization.get('fmt')!r}) is not implemented; expected quant_method 'fp8' with fmt 'e4m3'"
        )
    if quantization.get("moe_quant_algo"):
        raise ConfigError(
            f"experts quantised with {quantization['moe_quant_algo']} (quantization_config.moe_quant_algo) are not implemented; "
            "serve a checkpoint with MXFP4 or FP8 experts"
        )
    block = tuple(quantization.get("weight_block_size") or ())
    if block != (128, 128):
        raise ConfigError(f"weight_block_size {list(block)} is not implemented; expected [128, 128]")
    expert_dtype = read.get("expert_dtype") or "fp4"  # a missing key means fp4 (model.md 1.1)
    if expert_dtype not in ("fp4", "fp8"):
        raise ConfigError(f"expert_dtype {expert_dtype!r} is not implemented; expected 'fp4' or 'fp8'")
    return QuantizationFormat(weight_block_size=(128, 128), experts="mxfp4" if expert_dtype == "fp4" else "fp8")
