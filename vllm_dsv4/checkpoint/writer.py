"""Writes a checkpoint folder as the real repository has it: config, safetensors shards with their index, tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_dsv4.checkpoint.random_weights import random_tensors
from vllm_dsv4.checkpoint.schema import checkpoint_schema
from vllm_dsv4.checkpoint.tokenizer import MIN_VOCAB_SIZE, write_tokenizer
from vllm_dsv4.config import ConfigError, Dsv4Config

INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def write_checkpoint(
    folder: str | Path,
    raw_config: dict[str, Any],
    *,
    seed: int = 0,
    max_shard_bytes: int | None = None,
    include_draft: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> int:
    """Write a checkpoint of random weights; the same arguments give the same bytes.

    Args:
        folder: created if needed; a checkpoint in it is replaced.
        raw_config: ``config.json``'s content (see ``tiny.preset_config``); decides quantisation and dtype.
        seed: of the weights.
        max_shard_bytes: a shard is closed before it grows beyond this, so memory is bounded by it and the largest tensor. By
            default about a third of the checkpoint, at most 4 GB.
        include_draft: write the ``mtp.*`` tensors of ``num_nextn_predict_layers`` stages.
        progress: takes a line for every file.

    Returns:
        Bytes of all tensors.

    Raises:
        ConfigError: a configuration that this package cannot serve.
    """
    folder, config = Path(folder), Dsv4Config.from_hf(raw_config)
    name = raw_config.get("torch_dtype", "bfloat16")
    if name not in DTYPES:
        raise ConfigError(f"torch_dtype {name!r} is not implemented; choose one of {sorted(DTYPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("model-*-of-*.safetensors"):
        stale.unlink()
    (folder / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
    if config.vocab_size >= MIN_VOCAB_SIZE:
        write_tokenizer(folder, config.vocab_size, config.max_position_embeddings)
        progress(f"tokenizer.json: {config.vocab_size} tokens")
    else:
        progress(f"no tokenizer: vocab_size {config.vocab_size} is below {MIN_VOCAB_SIZE}; serve with --skip-tokenizer-init")
    tensors = random_tensors(config, seed, DTYPES[name], include_draft)
    return _write_shards(folder, tensors, max_shard_bytes or _default_shard_bytes(config, DTYPES[name]), progress)


def _default_shard_bytes(config: Dsv4Config, dtype: torch.dtype) -> int:
    elements = sum(math.prod(spec.shape) for spec in checkpoint_schema(config).values())
    total_bytes = elements * (dtype.itemsize if config.quantization is None else 1)  # nearly: few tensors are not one byte wide
    return max(1_000_000, min(4_000_000_000, total_bytes // 3))


def _write_shards(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], max_shard_bytes: int, progress: Callable[[str], None]) -> int:
    """Write shards under temporary names, since their final names hold their number, then the index."""
    weight_map: dict[str, int] = {}
    total_bytes = num_shards = 0
    for shard in _split(tensors, max_shard_bytes):
        num_shards += 1
        save_file(shard, folder / f".shard-{num_shards}", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, num_shards)
        shard_bytes = sum(tensor.nbytes for tensor in shard.values())
        total_bytes += shard_bytes
        progress(f"shard {num_shards}: {len(shard)} tensors, {shard_bytes / 1e6:.1f} MB")
    names = {number: f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)}
    for number, name in names.items():
        shard_file = folder / f".shard-{number}"
        shard_file.chmod(0o644)  # safetensors leaves its files readable by their owner alone
        shard_file.replace(folder / name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": {name: names[number] for name, number in weight_map.items()}}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return total_bytes


def _split(tensors: Iterator[tuple[str, torch.Tensor]], max_shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    shard_bytes = 0
    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = tensor
        shard_bytes += tensor.nbytes
    if shard:
        yield shard
