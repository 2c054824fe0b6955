"""Whether a model fits: weights per GPU, KV cache, longest context; from its configuration alone.

All sizes are bytes per GPU (per rank on a CPU). Caches are the same on every rank (model.md 3.4), so a longer context needs
memory on each GPU, while more GPUs leave more of it free of weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from vllm_dsv4.checkpoint.schema import FLOAT32, FP8_SCALE, INDEX, PLAIN, TensorSpec, checkpoint_schema
from vllm_dsv4.config import ConfigError, Dsv4Config
from vllm_dsv4.quantization.formats import (
    BLOCK_SIZE,
    INDEXER_FP8,
    PACKED_KV,
    PAGE_ALIGNMENT,
    STATE_BLOCK_SIZE,
    WINDOW_BLOCK_SIZE,
    CompressorStateFormat,
)

VOCAB_PADDING = 64
"""vLLM pads the rows of embedding and head to a multiple of this before it splits them."""


@dataclass(frozen=True)
class Layout:
    """How ranks share the model: ``gpus`` = tensor-parallel size x data-parallel size.

    The routed experts are spread over all GPUs, as whole experts with expert parallelism and in slices otherwise.
    """

    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False

    @property
    def gpus(self) -> int:
        return self.tensor_parallel * self.data_parallel

    def check(self, config: Dsv4Config) -> None:
        """Raises:
        ConfigError: the model cannot be split like this.
        """
        if config.o_groups % self.tensor_parallel:
            raise ConfigError(f"tensor-parallel size {self.tensor_parallel} does not divide the model's o_groups = {config.o_groups}")
        block = 1 if config.quantization is None else 128
        slices = {"the shared expert": (config.n_shared_experts * config.moe_intermediate_size, self.tensor_parallel)}
        if not self.expert_parallel:
            slices["the routed experts"] = (config.moe_intermediate_size, self.gpus)
        for name, (size, ranks) in slices.items():
            if size % (block * ranks):
                raise ConfigError(f"{ranks} ranks cut {name} ({size} wide) into slices that are not multiples of {block}")


@dataclass(frozen=True)
class WeightBytes:
    """Weights on one GPU. ``replicated`` are on every GPU, ``tables`` are the RoPE tables of all positions served."""

    routed_experts: int
    sharded: int
    replicated: int
    tables: int

    @property
    def total(self) -> int:
        return self.routed_experts + self.sharded + self.replicated + self.tables


def weight_bytes(config: Dsv4Config, layout: Layout, max_model_len: int, dtype_bytes: int = 2, kernels: bool = False) -> WeightBytes:
    """Bytes of the loaded weights on one GPU.

    Sums, over the tensors of the checkpoint, elements x bytes an element, divided

    * for routed experts by the number of GPUs (rounded up to whole experts with expert parallelism);
    * for ``wq_b``, ``attn_sink``, ``wo_a``, ``wo_b``, the shared expert, embedding and head by the tensor-parallel size;
    * for everything else by nothing: it is replicated.

    Loaded tensors keep the bytes of the file, except that E8M0 scales of FP8 weights become float32, routing tables int32, and,
    where the reference ops run and not ``kernels``, ``wo_a`` is widened to the model's dtype (model.md 5.1).
    The RoPE tables are 2 x max_model_len x rotated dimension x 4.
    """
    routed = sharded = replicated = 0
    for name, spec in checkpoint_schema(config).items():
        size = _loaded_bytes(name, spec, config, dtype_bytes, kernels)
        if ".experts." in name:
            routed += size
        elif _is_sharded(name):
            sharded += size
        else:
            replicated += size
    experts_per_gpu = -(-config.n_routed_experts // layout.gpus) if layout.expert_parallel else config.n_routed_experts / layout.gpus
    return WeightBytes(
        routed_experts=math.ceil(routed * experts_per_gpu / config.n_routed_experts),
        sharded=-(-sharded // layout.tensor_parallel),
        replicated=replicated,
        tables=2 * max_model_len * config.qk_rope_head_dim * 4,
    )


def _loaded_bytes(name: str, spec: TensorSpec, config: Dsv4Config, dtype_bytes: int, kernels: bool) -> int:
    elements = math.prod(spec.shape)
    if name in ("embed.weight", "head.weight"):
        elements = _round_up(spec.shape[0], VOCAB_PADDING) * spec.shape[1]
    if not kernels and name.endswith("attn.wo_a.scale"):
        return 0
    if spec.storage == PLAIN or (not kernels and name.endswith("attn.wo_a.weight")):
        return elements * dtype_bytes
    if spec.storage in (FLOAT32, FP8_SCALE, INDEX):
        return elements * 4
    return elements


def _is_sharded(name: str) -> bool:
    if name in ("embed.weight", "head.weight") or ".shared_experts." in name:
        return True
    return ".indexer." not in name and any(part in name for part in (".attn.wq_b.", ".attn.wo_a.", ".attn.wo_b.", ".attn_sink"))


@dataclass(frozen=True)
class CacheKind:
    """One of the model's caches. A page holds ``block_tokens`` tokens of one layer; ``window`` None means that all are kept."""

    name: str
    num_layers: int
    block_tokens: int
    page_bytes: int
    window: int | None = None

    @property
    def bytes_per_token(self) -> float:
        """Growth with the context, over all layers; 0 for the caches that only keep a window."""
        return 0.0 if self.window is not None else self.num_layers * self.page_bytes / self.block_tokens


def cache_kinds(config: Dsv4Config, packed: bool, row_bytes: int = 2) -> list[CacheKind]:
    """The model's caches in the order in which the layers declare them (model.md 5.2; integration.md 3.1).

    Every page is its content, rounded up to a multiple of 576 bytes. Content, for a block of n tokens: window n entries;
    compressed n / ratio entries; indexer n / 4 keys; compressor state n rows of float32 value and gate. An entry is 584 bytes,
    an indexer key 132; both are plain rows (head_dim x ``row_bytes``) when not ``packed``.
    """
    entry = PACKED_KV.entry_bytes if packed else config.head_dim * row_bytes
    key = INDEXER_FP8.entry_bytes if packed else config.index_head_dim * row_bytes
    kinds = [_sliding("window", config.num_hidden_layers, WINDOW_BLOCK_SIZE, entry, config.sliding_window)]
    for ratio in dict.fromkeys(ratio for ratio in config.compress_ratios if ratio):
        layers = config.compress_ratios.count(ratio)
        kinds.append(_growing(f"entries, ratio {ratio}", layers, ratio, entry))
        kinds.append(_state(f"compressor state, ratio {ratio}", layers, CompressorStateFormat(config.head_dim, ratio)))
        if ratio == 4:
            kinds.append(_growing("indexer keys", layers, ratio, key))
            kinds.append(_state("indexer state", layers, CompressorStateFormat(config.index_head_dim, ratio)))
    return kinds


def _growing(name: str, num_layers: int, ratio: int, entry_bytes: int) -> CacheKind:
    return CacheKind(name, num_layers, BLOCK_SIZE, _round_up(BLOCK_SIZE // ratio * entry_bytes, PAGE_ALIGNMENT))


def _sliding(name: str, num_layers: int, block_tokens: int, entry_bytes: int, window: int) -> CacheKind:
    return CacheKind(name, num_layers, block_tokens, _round_up(block_tokens * entry_bytes, PAGE_ALIGNMENT), window)


def _state(name: str, num_layers: int, state: CompressorStateFormat) -> CacheKind:
    return _sliding(name, num_layers, STATE_BLOCK_SIZE[state.compress_ratio], state.entry_bytes, state.window)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a block table: a block of the pool holds one page of each."""

    block_tokens: int
    window: int | None
    bytes_per_block: int

    def blocks(self, num_tokens: int, in_flight_tokens: int) -> int:
        """Blocks that one request holds at most, as vLLM reserves them.

        All tokens: ``ceil(n / block_tokens)``. A window: ``ceil(min(window - 1 + in_flight, n) / block_tokens) + 1``, where
        ``in_flight`` tokens are scheduled but not yet settled, and the window may begin inside a block.
        """
        if self.window is None:
            return -(-num_tokens // self.block_tokens)
        return -(-min(self.window - 1 + in_flight_tokens, num_tokens) // self.block_tokens) + 1


@dataclass(frozen=True)
class CachePool:
    """The pool of blocks that all groups draw from; a block is as large as its largest group."""

    groups: tuple[CacheGroup, ...]

    @property
    def bytes_per_block(self) -> int:
        return max(group.bytes_per_block for group in self.groups)

    @property
    def bytes_per_token(self) -> float:
        """Memory that each further token of a long context takes: one block for every ``BLOCK_SIZE``."""
        return sum(self.bytes_per_block / group.block_tokens for group in self.groups if group.window is None)

    def blocks_per_request(self, num_tokens: int, in_flight_tokens: int) -> int:
        return sum(group.blocks(num_tokens, in_flight_tokens) for group in self.groups)

    def window_blocks(self, in_flight_tokens: int) -> int:
        """Blocks of a long request's windows and compressor states, whatever its length."""
        return sum(group.blocks(1 << 40, in_flight_tokens) for group in self.groups if group.window is not None)

    def longest_context(self, kv_bytes: int, in_flight_tokens: int, limit: int) -> int:
        """The longest request, up to ``limit`` tokens, that fits alone; one block of the pool is never handed out."""
        usable = kv_bytes // self.bytes_per_block - 1
        return _largest(limit, lambda tokens: self.blocks_per_request(tokens, in_flight_tokens) <= usable)

    def max_concurrency(self, kv_bytes: int, num_tokens: int, in_flight_tokens: int) -> float:
        """Requests of ``num_tokens`` that fit at once, each with its full reservation: vLLM's "maximum concurrency"."""
        return kv_bytes // self.bytes_per_block / self.blocks_per_request(num_tokens, in_flight_tokens)


def cache_pool(kinds: list[CacheKind]) -> CachePool:
    """Group the caches as vLLM 0.32 and 0.33 do for packed blocks, so that groups of small pages fill a block.

    Caches of equal block size and window form a bucket. A bucket with as many layers of one page size as of each other is
    "balanced": it is split into groups of equal numbers of layers of each size. That number is chosen to waste the least over
    the balanced buckets, but no less than the largest balanced bucket of several page sizes has, which must stay whole.
    """
    buckets: dict[tuple[int, int | None], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for kind in kinds:
        if kind.num_layers:
            buckets[kind.block_tokens, kind.window][kind.page_bytes] += kind.num_layers
    repeats = _repeats_per_group(list(buckets.values()))
    num_groups = {key: _num_groups(pages, repeats) for key, pages in buckets.items()}
    if repeats is None and len({page for pages in buckets.values() for page in pages}) > 1:
        _split_windows(buckets, num_groups)
    groups = []
    for (block_tokens, window), pages in buckets.items():
        count = num_groups[block_tokens, window]
        sizes = [sum(-(-(layers - index) // count) * page for page, layers in pages.items()) for index in range(count)]
        groups += [CacheGroup(block_tokens, window, size) for size in sizes]
    return CachePool(tuple(groups))


def _is_balanced(pages: dict[int, int]) -> bool:
    return len(set(pages.values())) == 1


def _repeats_per_group(buckets: list[dict[int, int]]) -> int | None:
    balanced = [pages for pages in buckets if _is_balanced(pages)]
    smallest = max((max(pages.values()) for pages in balanced if len(pages) > 1), default=0)
    if not smallest:
        return None
    counts = [max(pages.values()) for pages in balanced]
    # The larger of equally good sizes, since fewer groups mean fewer block tables.
    return min(range(smallest, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size))


def _num_groups(pages: dict[int, int], repeats: int | None) -> int:
    return -(-max(pages.values()) // repeats) if repeats is not None and _is_balanced(pages) else 1


def _split_windows(buckets: dict[tuple[int, int | None], dict[int, int]], num_groups: dict[tuple[int, int | None], int]) -> None:
    """Without such a bucket, windows are split until they fit the block that the other caches need."""
    block_bytes = max(sum((layers if key[1] is None else 1) * page for page, layers in pages.items()) for key, pages in buckets.items())
    for key, pages in buckets.items():
        if key[1] is not None:
            pages_per_block = max(block_bytes // next(iter(pages)), 1)
            num_groups[key] = -(-sum(pages.values()) // pages_per_block)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
