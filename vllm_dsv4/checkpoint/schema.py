"""Every tensor of a DeepSeek-V4 checkpoint: its native name, shape and storage dtypes (model.md 2).

``checkpoint_schema`` derives the backbone's table from the configuration; ``CheckpointChecker`` compares what is read from
disk with it and reports every difference at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from vllm_dsv4.config import Dsv4Config

FP8_BLOCK = 128
"""Rows and columns that share one scale of a block-FP8 weight."""
MXFP4_GROUP = 32
"""Columns that share one scale of an MXFP4 weight."""

SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}

PLAIN = "plain"
FLOAT32 = "float32"
"""Parameters that the real checkpoint keeps in float32, and the model too, whatever its dtype."""
FP8_WEIGHT = "fp8_weight"
FP8_SCALE = "fp8_scale"
MXFP4_WEIGHT = "mxfp4_weight"
MXFP4_SCALE = "mxfp4_scale"
INDEX = "index"

_FLOATS = frozenset({torch.bfloat16, torch.float32, torch.float16})
_STORAGE_DTYPES: dict[str, frozenset[torch.dtype]] = {
    PLAIN: _FLOATS,
    FLOAT32: _FLOATS,
    FP8_WEIGHT: frozenset({torch.float8_e4m3fn}),
    # Flash ships UE8M0 scales, Flash-Base float32 ones (model.md 1.1).
    FP8_SCALE: frozenset({torch.float8_e8m0fnu, torch.float32}),
    MXFP4_WEIGHT: frozenset({torch.int8}),
    MXFP4_SCALE: frozenset({torch.float8_e8m0fnu}),
    INDEX: frozenset({torch.int64, torch.int32}),
}


class CheckpointError(ValueError):
    """The checkpoint's tensors are not those that its configuration asks for."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor on disk.

    ``shape`` is the stored shape: an MXFP4 weight [N, K] is stored as [N, K/2] bytes. ``storage`` is one of the storage
    classes of this module and decides ``dtypes``, the set of accepted dtypes.
    """

    shape: tuple[int, ...]
    storage: str

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        return _STORAGE_DTYPES[self.storage]


def checkpoint_schema(config: Dsv4Config) -> dict[str, TensorSpec]:
    """Every backbone tensor, by native name, in the order of the layers (model.md 2). Draft tensors are not included."""
    schema = _SchemaBuilder(config)
    schema.plain("embed.weight", config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        schema.layer(f"layers.{layer}.", config.compress_ratios[layer], config.is_hash_layer(layer))
    schema.plain("norm.weight", config.hidden_size)
    schema.hyper_connection_head("")
    schema.plain("head.weight", config.vocab_size, config.hidden_size)
    return schema.tensors


def draft_schema(config: Dsv4Config) -> dict[str, TensorSpec]:
    """The tensors of the base release's draft stages, ``num_nextn_predict_layers`` of them (model.md 2, end; 6)."""
    schema = _SchemaBuilder(config)
    for stage in range(config.num_nextn_predict_layers):
        prefix = f"mtp.{stage}."
        schema.layer(prefix, compress_ratio=0, is_hash=False)
        for name in ("enorm", "hnorm", "norm"):
            schema.plain(f"{prefix}{name}.weight", config.hidden_size)
        for name in ("e_proj", "h_proj"):
            schema.linear(f"{prefix}{name}", config.hidden_size, config.hidden_size)
        schema.hyper_connection_head(prefix)
    return schema.tensors


def is_draft_tensor(name: str) -> bool:
    """Whether a tensor belongs to the draft model (multi-token prediction), which the backbone never reads."""
    return name.startswith("mtp.")


class _SchemaBuilder:
    def __init__(self, config: Dsv4Config):
        self.config = config
        self.tensors: dict[str, TensorSpec] = {}

    def add(self, name: str, storage: str, *shape: int) -> None:
        self.tensors[name] = TensorSpec(shape, storage)

    def plain(self, name: str, *shape: int) -> None:
        self.add(name, PLAIN, *shape)

    def float32(self, name: str, *shape: int) -> None:
        self.add(name, FLOAT32, *shape)

    def linear(self, name: str, out_features: int, in_features: int) -> None:
        """A projection that is block FP8 in a quantised checkpoint (model.md 2.1)."""
        if self.config.quantization is None:
            self.plain(f"{name}.weight", out_features, in_features)
            return
        self.add(f"{name}.weight", FP8_WEIGHT, out_features, in_features)
        self.add(f"{name}.scale", FP8_SCALE, -(-out_features // FP8_BLOCK), -(-in_features // FP8_BLOCK))

    def routed_expert(self, name: str, out_features: int, in_features: int) -> None:
        """A routed expert's projection: MXFP4 (model.md 2.2), or stored as the linear layers are."""
        if self.config.quantization is None or self.config.quantization.experts != "mxfp4":
            self.linear(name, out_features, in_features)
            return
        self.add(f"{name}.weight", MXFP4_WEIGHT, out_features, in_features // 2)
        self.add(f"{name}.scale", MXFP4_SCALE, out_features, in_features // MXFP4_GROUP)

    def layer(self, prefix: str, compress_ratio: int, is_hash: bool) -> None:
        for part in ("attn", "ffn"):
            self.plain(f"{prefix}{part}_norm.weight", self.config.hidden_size)
            self.float32(f"{prefix}hc_{part}_fn", self.config.hc_rows, self.config.hc_mult * self.config.hidden_size)
            self.float32(f"{prefix}hc_{part}_base", self.config.hc_rows)
            self.float32(f"{prefix}hc_{part}_scale", 3)
        self.attention(f"{prefix}attn.", compress_ratio)
        self.mixture_of_experts(f"{prefix}ffn.", is_hash)

    def attention(self, prefix: str, compress_ratio: int) -> None:
        config = self.config
        self.float32(f"{prefix}attn_sink", config.num_attention_heads)
        self.linear(f"{prefix}wq_a", config.q_lora_rank, config.hidden_size)
        self.plain(f"{prefix}q_norm.weight", config.q_lora_rank)
        self.linear(f"{prefix}wq_b", config.num_attention_heads * config.head_dim, config.q_lora_rank)
        self.linear(f"{prefix}wkv", config.head_dim, config.hidden_size)
        self.plain(f"{prefix}kv_norm.weight", config.head_dim)
        self.linear(f"{prefix}wo_a", config.o_groups * config.o_lora_rank, config.heads_per_group * config.head_dim)
        self.linear(f"{prefix}wo_b", config.hidden_size, config.o_groups * config.o_lora_rank)
        if compress_ratio:
            self.compressor(f"{prefix}compressor.", compress_ratio, config.head_dim)
        if compress_ratio == 4:
            self.linear(f"{prefix}indexer.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
            self.plain(f"{prefix}indexer.weights_proj.weight", config.index_n_heads, config.hidden_size)
            self.compressor(f"{prefix}indexer.compressor.", compress_ratio, config.index_head_dim)

    def compressor(self, prefix: str, compress_ratio: int, head_dim: int) -> None:
        # Ratio-4 windows overlap: a token projects one half for its own window and one for the next (model.md 3.5).
        width = 2 * head_dim if compress_ratio == 4 else head_dim
        self.plain(f"{prefix}wkv.weight", width, self.config.hidden_size)
        self.plain(f"{prefix}wgate.weight", width, self.config.hidden_size)
        self.float32(f"{prefix}ape", compress_ratio, width)
        self.plain(f"{prefix}norm.weight", head_dim)

    def mixture_of_experts(self, prefix: str, is_hash: bool) -> None:
        config = self.config
        self.plain(f"{prefix}gate.weight", config.n_routed_experts, config.hidden_size)
        if is_hash:
            self.add(f"{prefix}gate.tid2eid", INDEX, config.vocab_size, config.num_experts_per_tok)
        else:
            self.float32(f"{prefix}gate.bias", config.n_routed_experts)
        for expert in range(config.n_routed_experts):
            for name, out_features, in_features in _ffn_shapes(config.hidden_size, config.moe_intermediate_size):
                self.routed_expert(f"{prefix}experts.{expert}.{name}", out_features, in_features)
        shared_intermediate = config.n_shared_experts * config.moe_intermediate_size
        for name, out_features, in_features in _ffn_shapes(config.hidden_size, shared_intermediate):
            self.linear(f"{prefix}shared_experts.{name}", out_features, in_features)

    def hyper_connection_head(self, prefix: str) -> None:
        self.float32(f"{prefix}hc_head_fn", self.config.hc_mult, self.config.hc_mult * self.config.hidden_size)
        self.float32(f"{prefix}hc_head_base", self.config.hc_mult)
        self.float32(f"{prefix}hc_head_scale", 1)


def _ffn_shapes(hidden: int, intermediate: int) -> tuple[tuple[str, int, int], ...]:
    """Gate (w1), down (w2) and up (w3) projections as (name, out, in)."""
    return (("w1", intermediate, hidden), ("w2", hidden, intermediate), ("w3", intermediate, hidden))


class CheckpointChecker:
    """Compares the tensors of a checkpoint, as they are read, with the schema of its configuration.

    ``check`` takes one tensor and says whether to load it; ``finish`` raises one ``CheckpointError`` that names all that is
    missing, unexpected, repeated, of the wrong shape or of the wrong dtype.
    """

    max_names = 20
    """How many names of one kind of fault the message lists; the count is always given."""

    def __init__(self, config: Dsv4Config):
        self._schema = checkpoint_schema(config)
        self._seen: set[str] = set()
        self._faults: dict[str, list[str]] = {kind: [] for kind in ("unexpected", "repeated", "wrong shape", "wrong dtype")}

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype | str) -> bool:
        """Take one tensor as read; True if it can be loaded. Draft tensors are passed over, faults are kept for ``finish``.

        Args:
            name: native name.
            shape: stored shape.
            dtype: a torch dtype, or its name in a safetensors header (``"F8_E8M0"``).
        """
        if is_draft_tensor(name):
            return False
        spec = self._schema.get(name)
        if spec is None:
            self._faults["unexpected"].append(name)
            return False
        if name in self._seen:
            self._faults["repeated"].append(name)
            return False
        self._seen.add(name)
        if isinstance(dtype, str):
            dtype = SAFETENSORS_DTYPES.get(dtype, dtype)
        right_dtype, right_shape = dtype in spec.dtypes, tuple(shape) == spec.shape
        if not right_dtype:
            expected = " or ".join(sorted(dtype_name(accepted) for accepted in spec.dtypes))
            self._faults["wrong dtype"].append(f"{name} is {dtype_name(dtype)}, expected {expected}")
        if not right_shape:
            self._faults["wrong shape"].append(f"{name} is {list(shape)}, expected {list(spec.shape)}")
        return right_dtype and right_shape

    def finish(self) -> None:
        """Raises:
        CheckpointError: the tensors given to ``check`` are not exactly those of the schema, in shape and dtype.
        """
        missing = [name for name in self._schema if name not in self._seen]
        faults = {"missing": missing, **self._faults}
        if not any(faults.values()):
            return
        lines = [_fault_line(kind, names, self.max_names) for kind, names in faults.items() if names]
        raise CheckpointError("\n".join(["the checkpoint's tensors do not match its config.json:", *lines, *self._hint(missing)]))

    def _hint(self, missing: Sequence[str]) -> list[str]:
        if any(name.startswith("model.") for name in self._faults["unexpected"]):
            return ["names under 'model.' are those of transformers' save_pretrained; DeepSeek's own names are expected"]
        if any(".experts." in fault for fault in self._faults["wrong dtype"]):
            return ["is expert_dtype ('fp4' or 'fp8') and quantization_config in config.json right for these files?"]
        if missing and missing[0] == "embed.weight":
            return ["is this the folder of a DeepSeek-V4 checkpoint?"]
        if missing:
            return ["is the download complete? model.safetensors.index.json names the file of every tensor"]
        return []


def check_checkpoint(config: Dsv4Config, tensors: Iterable[tuple[str, Sequence[int], torch.dtype | str]]) -> None:
    """Check a whole checkpoint given as (name, shape, dtype).

    Raises:
        CheckpointError: see ``CheckpointChecker.finish``.
    """
    checker = CheckpointChecker(config)
    for name, shape, dtype in tensors:
        checker.check(name, shape, dtype)
    checker.finish()


def dtype_name(dtype: torch.dtype | str) -> str:
    """The safetensors name of a dtype (``BF16``), whichever way it is given."""
    return dtype if isinstance(dtype, str) else _DTYPE_NAMES.get(dtype, str(dtype))


def _fault_line(kind: str, faults: Sequence[str], max_names: int) -> str:
    shown = [f"    {fault}" for fault in faults[:max_names]]
    if len(faults) > max_names:
        shown.append(f"    ... and {len(faults) - max_names} more")
    return "\n".join([f"  {kind} ({len(faults)}):", *shown])
