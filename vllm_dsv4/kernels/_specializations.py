"""Every specialisation of a kernel that serving a model can meet.

Each op has a function here that makes its arguments as the layers pass them: on the meta device, with the layers' strides and
offsets. ``specializations`` calls the ops on these for all numbers of tokens at which they may choose differently, records the
launches, and keeps those that Triton compiles separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from vllm_dsv4.backend import BACKENDS
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.kernels._launch import Capability, Launch, record_launches
from vllm_dsv4.ops import OPS
from vllm_dsv4.quantization.formats import (
    BLOCK_SIZE,
    INDEXER_FP8,
    INDEXER_MXFP4,
    PACKED_KV,
    STATE_BLOCK_SIZE,
    WINDOW_BLOCK_SIZE,
    CompressorStateFormat,
)
from vllm_dsv4.reference.indexer_query import IndexerQuery

_BLOCK = 128
"""Rows and columns of a weight that share a scale."""

NUM_TOKENS = tuple(sorted({size + more for size in (1 << bit for bit in range(15)) for more in (0, 1)}))
"""Powers of two and what follows each: kernels change their configuration at powers of two, if at all."""


@dataclass(frozen=True)
class Shapes:
    """What a rank computes with: the model's sizes, how the model is split, and the formats of its caches."""

    config: Dsv4Config
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel: bool = False
    """Whether all ranks, of tensor and data parallelism, share the experts; else each has a slice of every expert."""
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    """Of the window and entry caches: uint8 is packed FP8; None is what the engine's ``auto`` means."""
    indexer_format: str | None = None

    @property
    def num_heads(self) -> int:
        return self.config.num_attention_heads // self.tensor_parallel_size

    @property
    def num_groups(self) -> int:
        return self.config.o_groups // self.tensor_parallel_size

    @property
    def partial_sum_dtype(self) -> torch.dtype | None:
        """Of what is still to be summed over ranks."""
        return torch.float32 if self.tensor_parallel_size > 1 else None

    @property
    def ratios(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.config.compress_ratios)))

    @property
    def is_quantized(self) -> bool:
        return self.config.quantization is not None

    def kv_cache(self, page_size: int) -> Tensor:
        dtype = self.kv_dtype or (torch.uint8 if self.is_quantized else self.dtype)
        return _cache(page_size, PACKED_KV.entry_bytes if dtype == torch.uint8 else self.config.head_dim, dtype)

    @property
    def keys_format(self) -> str:
        return self.indexer_format or ("fp8" if self.is_quantized else "rows")

    def keys_cache(self) -> Tensor:
        entry = {"fp8": INDEXER_FP8.entry_bytes, "mxfp4": INDEXER_MXFP4.entry_bytes, "rows": self.config.index_head_dim}
        return _cache(BLOCK_SIZE // 4, entry[self.keys_format], self.dtype if self.keys_format == "rows" else torch.uint8)


@dataclass(frozen=True)
class Specialization:
    """One kernel to compile: the op that launches it, for which of ``NUM_TOKENS``, and how."""

    op: str
    num_tokens: tuple[int, ...]
    launch: Launch

    @property
    def kernel(self) -> str:
        return self.launch.kernel.__name__

    @property
    def constants(self) -> dict[str, object]:
        """Its compile-time arguments and options, by name."""
        return self.launch.options


@dataclass(frozen=True)
class Call:
    """Arguments of one call of an op."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


INPUTS: dict[str, Callable[[Shapes, int], Iterator[Call]]] = {}
"""By op: its calls in a step of so many tokens."""


def specializations(
    shapes: Shapes, capability: Capability, num_sms: int | None = None, num_tokens: tuple[int, ...] = NUM_TOKENS
) -> list[Specialization]:
    """All kernels of the ops that have some, for a GPU of ``capability`` with ``num_sms`` multiprocessors; no GPU is needed."""
    found: dict[object, tuple[str, list[int], Launch]] = {}
    for op in OPS:
        if find_spec(f"{BACKENDS['triton']}.{op}") is None:
            continue
        function = getattr(import_module(f"{BACKENDS['triton']}.{op}"), op)
        for tokens in num_tokens:
            for launch in _record(function, INPUTS[op](shapes, tokens), capability, num_sms):
                _, seen, _ = found.setdefault(specialization_key(launch), (op, [], launch))
                seen.append(tokens)
    return [Specialization(op, tuple(sorted(set(seen))), launch) for op, seen, launch in found.values()]


def launches(shapes: Shapes, capability: Capability, num_sms: int | None = None) -> list[Launch]:
    return [specialization.launch for specialization in specializations(shapes, capability, num_sms)]


def _record(function: Callable[..., Any], calls: Iterator[Call], capability: Capability, num_sms: int | None) -> list[Launch]:
    with record_launches(capability, num_sms) as recorded:
        for arguments in calls:
            function(*arguments.args, **arguments.kwargs)
    return recorded


def specialization_key(launch: Launch) -> tuple[object, ...]:
    """Equal only for launches that Triton compiles once: it looks at the type of each argument, whether a pointer or a number
    is a multiple of 16, and whether a number is 1."""
    parameters = launch.kernel.params
    values = {p.name: value for p, value in zip(parameters, launch.args, strict=False)}
    values |= launch.options
    key: list[object] = [launch.kernel.__module__, launch.kernel.__name__]
    for parameter in parameters:
        value = values.pop(parameter.name, parameter.default)
        constant = parameter.is_constexpr or value is None
        key.append(str(value) if constant else _argument_key(value, not parameter.do_not_specialize))
    return (*key, tuple(sorted((name, str(value)) for name, value in values.items())))


def _argument_key(value: object, specialize: bool) -> tuple[object, ...]:
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, specialize and value.data_ptr() % 16 == 0)
    if isinstance(value, int) and not isinstance(value, bool):
        size = "i32" if -(2**31) <= value < 2**31 else "i64"
        return (size, specialize and value == 1, specialize and value % 16 == 0)
    return (type(value).__name__,)


def _op(function: Callable[[Shapes, int], Iterator[Call]]) -> Callable[[Shapes, int], Iterator[Call]]:
    INPUTS[function.__name__] = function
    return function


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _float(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.float32)


def _int(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)


def _long(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int64)


def _cache(page_size: int, entry: int, dtype: torch.dtype) -> Tensor:
    """Several pages side by side in a block, whose size is a multiple of the page alignment."""
    block = 576 * 1024
    return _empty(2, block // dtype.itemsize, dtype=dtype)[:, : page_size * entry].unflatten(1, (page_size, entry))


def _block_tables() -> Iterator[Tensor]:
    """Their width depends on the longest context: a multiple of 16 or not."""
    yield _int(16, 4096)
    yield _int(16, 4099)


def _cos_sin(shapes: Shapes) -> Tensor:
    return _float(4096, shapes.config.qk_rope_head_dim)


def _aligned_rows(widths: tuple[int, ...], aligned: bool) -> tuple[list[int], int]:
    """Where each part of a merged layer begins, and how many rows it has (``quantization/merged.py``)."""
    starts, start = [], 0
    for width in widths:
        starts.append(start)
        start += -(-width // _BLOCK) * _BLOCK if aligned else width
    return starts, start


def _merged(num_tokens: int, widths: tuple[int, ...], dtype: torch.dtype, aligned: bool) -> list[Tensor]:
    """The results of a merged layer: column slices of one tensor."""
    starts, total = _aligned_rows(widths, aligned)
    out = _empty(num_tokens, total, dtype=dtype)
    return [out[:, start : start + width] for start, width in zip(starts, widths, strict=True)]


def _down_widths(shapes: Shapes) -> tuple[int, ...]:
    return shapes.config.q_lora_rank, shapes.config.head_dim


def _up_widths(shapes: Shapes, ratio: int) -> tuple[int, ...]:
    """Queries, and those of the indexer."""
    config = shapes.config
    queries = shapes.num_heads * config.head_dim
    return (queries, config.index_n_heads * config.index_head_dim) if ratio == 4 else (queries,)


def _states(shapes: Shapes, ratio: int) -> list[CompressorStateFormat]:
    """The compressors of a layer: of KV entries, and of the indexer's keys."""
    dims = (shapes.config.head_dim, shapes.config.index_head_dim) if ratio == 4 else (shapes.config.head_dim,) if ratio else ()
    return [CompressorStateFormat(dim, ratio) for dim in dims]


def _compressor_widths(shapes: Shapes, ratio: int) -> tuple[int, ...]:
    return tuple(state.width for state in _states(shapes, ratio) for _ in ("kv", "gate"))


def _state_cache(state: CompressorStateFormat) -> Tensor:
    return _cache(STATE_BLOCK_SIZE[state.compress_ratio], state.row_dim, torch.float32)


def _quantizable(shapes: Shapes) -> Iterator[tuple[int, int, torch.dtype | None]]:
    """(rows, columns, dtype of the result) of the layers that are FP8 in a quantised checkpoint."""
    config = shapes.config
    intermediate = config.n_shared_experts * config.moe_intermediate_size
    aligned = shapes.is_quantized
    yield _aligned_rows(_down_widths(shapes), aligned)[1], config.hidden_size, None
    for ratio in shapes.ratios:
        yield _aligned_rows(_up_widths(shapes, ratio), aligned)[1], config.q_lora_rank, None
    yield config.hidden_size, shapes.num_groups * config.o_lora_rank, shapes.partial_sum_dtype
    yield _aligned_rows((intermediate, intermediate), aligned)[1], config.hidden_size, None
    yield config.hidden_size, intermediate, None


def _unquantized(shapes: Shapes) -> Iterator[tuple[int, int, torch.dtype | None]]:
    """The layers that never are: compressors, the indexer's weights, gate and head."""
    config = shapes.config
    for ratio in shapes.ratios:
        if ratio:
            yield sum(_compressor_widths(shapes, ratio)), config.hidden_size, torch.float32
        if ratio == 4:
            yield config.index_n_heads, config.hidden_size, None
    yield config.n_routed_experts, config.hidden_size, torch.float32
    yield -(-config.vocab_size // 64) * 64 // shapes.tensor_parallel_size, config.hidden_size, torch.float32


@_op
def rms_norm(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config, dtype = shapes.config, shapes.dtype
    yield call(_empty(num_tokens, config.hidden_size, dtype=dtype), _empty(config.hidden_size, dtype=dtype), config.rms_norm_eps)
    qr, _ = _merged(num_tokens, _down_widths(shapes), dtype, shapes.is_quantized)
    yield call(qr, _empty(config.q_lora_rank, dtype=dtype), config.rms_norm_eps)


@_op
def linear(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    layers = [*_unquantized(shapes), *([] if shapes.is_quantized else _quantizable(shapes))]
    for rows, columns, out_dtype in layers:
        x, weight = _empty(num_tokens, columns, dtype=shapes.dtype), _empty(rows, columns, dtype=shapes.dtype)
        yield call(x, weight, out_dtype=out_dtype)


@_op
def fp8_linear(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    for rows, columns, out_dtype in _quantizable(shapes) if shapes.is_quantized else ():
        weight = _empty(rows, columns, dtype=torch.float8_e4m3fn)
        sf = _float(-(-rows // _BLOCK), -(-columns // _BLOCK))
        yield call(_empty(num_tokens, columns, dtype=shapes.dtype), weight, sf, out_dtype=out_dtype)


@_op
def activation_quantize(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    """No layer calls it: kernels of layers quantise themselves."""
    yield call(_empty(num_tokens, shapes.config.hidden_size, dtype=shapes.dtype))


@_op
def grouped_linear(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config = shapes.config
    columns = config.heads_per_group * config.head_dim
    x = _empty(num_tokens, shapes.num_groups, columns, dtype=shapes.dtype)
    weight_shape = shapes.num_groups, config.o_lora_rank, columns
    if shapes.is_quantized and config.o_lora_rank % _BLOCK == 0:
        weight_sf = _float(shapes.num_groups, config.o_lora_rank // _BLOCK, -(-columns // _BLOCK))
        yield call(x, _empty(*weight_shape, dtype=torch.float8_e4m3fn), weight_sf)
    else:
        yield call(x, _empty(*weight_shape, dtype=shapes.dtype))


def _streams(shapes: Shapes, num_tokens: int) -> Tensor:
    return _empty(num_tokens, shapes.config.hc_mult, shapes.config.hidden_size, dtype=shapes.dtype)


def _hyper_connection(shapes: Shapes, rows: int, num_scales: int) -> tuple[Tensor, Tensor, Tensor]:
    return _float(rows, shapes.config.hc_mult * shapes.config.hidden_size), _float(num_scales), _float(rows)


@_op
def hc_pre(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config = shapes.config
    parameters = _hyper_connection(shapes, config.hc_rows, 3)
    yield call(_streams(shapes, num_tokens), *parameters, config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)


@_op
def hc_post(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config, size = shapes.config, shapes.config.hc_mult
    x = _empty(num_tokens, config.hidden_size, dtype=shapes.dtype)
    yield call(x, _streams(shapes, num_tokens), _float(num_tokens, size), _float(num_tokens, size, size))


@_op
def hc_post_pre(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config = shapes.config
    weight = _empty(config.hidden_size, dtype=shapes.dtype)
    for post in hc_post(shapes, num_tokens):
        parameters = _hyper_connection(shapes, config.hc_rows, 3)
        yield call(*post.args, *parameters, weight, config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)


@_op
def hc_head(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config = shapes.config
    yield call(_streams(shapes, num_tokens), *_hyper_connection(shapes, config.hc_mult, 1), config.rms_norm_eps, config.hc_eps)


@_op
def norm_rope_insert(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config, dtype = shapes.config, shapes.dtype
    _, kv = _merged(num_tokens, _down_widths(shapes), dtype, shapes.is_quantized)
    weight, positions, slots = _empty(config.head_dim, dtype=dtype), _long(num_tokens), _long(num_tokens)
    for ratio in shapes.ratios:
        q = _merged(num_tokens, _up_widths(shapes, ratio), dtype, shapes.is_quantized)[0]
        q = q.unflatten(1, (shapes.num_heads, config.head_dim))
        cache = shapes.kv_cache(WINDOW_BLOCK_SIZE)
        yield call(q, kv, weight, positions, _cos_sin(shapes), config.rms_norm_eps, cache, slots)


@_op
def compressor_store(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    for ratio in shapes.ratios:
        rows = _merged(num_tokens, _compressor_widths(shapes, ratio), torch.float32, False)
        for index, state in enumerate(_states(shapes, ratio)):
            kv, gate = rows[2 * index : 2 * index + 2]
            ape = _float(ratio, state.width)
            yield call(kv, gate, ape, _long(num_tokens), _state_cache(state), _long(num_tokens))


@_op
def compress_insert(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config, positions, entry_slots = shapes.config, _long(num_tokens), _long(num_tokens)
    for ratio in shapes.ratios:
        for state in _states(shapes, ratio):
            is_kv = state.head_dim == config.head_dim
            cache = shapes.kv_cache(BLOCK_SIZE // ratio) if is_kv else shapes.keys_cache()
            weight = _empty(state.head_dim, dtype=shapes.dtype)
            for table in _block_tables():
                head = (_state_cache(state), table, _int(num_tokens), positions, weight, config.rms_norm_eps)
                yield call(*head, _cos_sin(shapes), cache, entry_slots, ratio)


@_op
def indexer_query(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config = shapes.config
    if 4 in shapes.ratios:
        q = _merged(num_tokens, _up_widths(shapes, 4), shapes.dtype, shapes.is_quantized)[1]
        q = q.unflatten(1, (config.index_n_heads, config.index_head_dim))
        weights = _empty(num_tokens, config.index_n_heads, dtype=shapes.dtype)
        yield call(q, weights, _long(num_tokens), _cos_sin(shapes), shapes.keys_format)


@_op
def indexer_topk(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config = shapes.config
    heads, dim = config.index_n_heads, config.index_head_dim
    q = {
        "fp8": _empty(num_tokens, heads, dim, dtype=torch.float8_e4m3fn),
        "mxfp4": _empty(num_tokens, heads, dim // 2, dtype=torch.uint8),
        "rows": _empty(num_tokens, heads, dim, dtype=shapes.dtype),
    }[shapes.keys_format]
    q_sf = _empty(num_tokens, heads, dim // 32, dtype=torch.uint8) if shapes.keys_format == "mxfp4" else None
    query = IndexerQuery(q, q_sf, _float(num_tokens, heads))
    for table in _block_tables() if 4 in shapes.ratios else ():
        yield call(query, shapes.keys_cache(), table, _int(num_tokens), _int(num_tokens), config.index_topk)


@_op
def token_to_req(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    yield call(_int(17), num_tokens)


@_op
def completed_entries(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    for ratio in filter(None, shapes.ratios):
        for table in _block_tables():
            yield call(_long(num_tokens), _long(num_tokens), _int(num_tokens), table, ratio, BLOCK_SIZE // ratio)


@_op
def window_slots(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    for table in _block_tables():
        yield call(_long(num_tokens), _int(num_tokens), table, shapes.config.sliding_window, WINDOW_BLOCK_SIZE)


@_op
def entry_slots(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    num_entries, requests, topk = _int(num_tokens), _int(num_tokens), shapes.config.index_topk
    for table in _block_tables():
        if 4 in shapes.ratios:
            yield call(num_entries, requests, table, BLOCK_SIZE // 4, topk_indices=_int(num_tokens, topk))
        for width in _ENTRY_WIDTHS if 128 in shapes.ratios else ():
            yield call(num_entries, requests, table, BLOCK_SIZE // 128, width=width)


_ENTRY_WIDTHS = (1, 17, 1024)
"""Entries of the longest context, a ratio of 128: any number."""


@_op
def sparse_mla(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config = shapes.config
    q = _empty(num_tokens, shapes.num_heads, config.head_dim, dtype=shapes.dtype)
    window, sink = _int(num_tokens, config.sliding_window), _float(shapes.num_heads)
    widths = {0: (None,), 4: (config.index_topk,), 128: _ENTRY_WIDTHS}
    for ratio in shapes.ratios:
        for width in widths[ratio]:
            entries = {} if width is None else {"entry_cache": shapes.kv_cache(BLOCK_SIZE // ratio), "entry_slots": _int(num_tokens, width)}
            yield call(q, shapes.kv_cache(WINDOW_BLOCK_SIZE), window, sink, config.head_dim**-0.5, **entries)


@_op
def inverse_rope(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    x = _empty(num_tokens, shapes.num_heads, shapes.config.head_dim, dtype=shapes.dtype)
    yield call(x, _long(num_tokens), _cos_sin(shapes), out=x)


@_op
def router(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config = shapes.config
    scores, scale = _float(num_tokens, config.n_routed_experts), config.routed_scaling_factor
    if config.num_hash_layers < config.num_hidden_layers:
        yield call(scores, config.num_experts_per_tok, scale, bias=_float(config.n_routed_experts))
    if config.num_hash_layers:
        table = _int(config.vocab_size, config.num_experts_per_tok)
        yield call(scores, config.num_experts_per_tok, scale, tid2eid=table, input_ids=_int(num_tokens))


@_op
def swiglu(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    size = shapes.config.n_shared_experts * shapes.config.moe_intermediate_size
    gate, up = _merged(num_tokens, (size, size), shapes.dtype, shapes.is_quantized)
    yield call(gate, up, shapes.config.swiglu_limit, shapes.dtype)


@_op
def experts(shapes: Shapes, num_tokens: int) -> Iterator[Call]:
    config = shapes.config
    ranks = shapes.tensor_parallel_size * shapes.data_parallel_size
    spread = shapes.expert_parallel and ranks > 1
    number = -(-config.n_routed_experts // ranks) if spread else config.n_routed_experts
    size = config.moe_intermediate_size // (1 if spread else ranks)
    w13, w13_sf = _stack(shapes, number, 2 * size, config.hidden_size)
    w2, w2_sf = _stack(shapes, number, config.hidden_size, size)
    chosen = (num_tokens, config.num_experts_per_tok)
    yield call(
        _empty(num_tokens, config.hidden_size, dtype=shapes.dtype),
        _float(*chosen),
        _int(*chosen),
        w13,
        w2,
        w13_sf=w13_sf,
        w2_sf=w2_sf,
        swiglu_limit=config.swiglu_limit,
        expert_map=_int(config.n_routed_experts) if spread else None,
    )


def _stack(shapes: Shapes, number: int, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
    """A stack of experts' weights and its scales, as ``moe/method.py`` registers them."""
    quantization = shapes.config.quantization
    if quantization is None:
        return _empty(number, rows, columns, dtype=shapes.dtype), None
    if quantization.experts == "mxfp4":
        return _empty(number, rows, columns // 2, dtype=torch.uint8), _empty(number, rows, -(-columns // 32), dtype=torch.uint8)
    return _empty(number, rows, columns, dtype=torch.float8_e4m3fn), _float(number, -(-rows // _BLOCK), -(-columns // _BLOCK))
