"""Reads the list of tensors of a checkpoint folder from its safetensors headers, without the tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_dsv4.checkpoint.schema import CheckpointError
from vllm_dsv4.checkpoint.writer import INDEX_FILE

_MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""


def iter_headers(folder: str | Path) -> Iterator[tuple[str, list[int], str]]:
    """Yield (name, shape, safetensors dtype) of every tensor in the files of a checkpoint.

    Raises:
        CheckpointError: a file that the index names is not there, or a file is cut short.
    """
    for path in weight_files(folder):
        for name, entry in _read_header(path).items():
            if name != "__metadata__":
                yield name, entry["shape"], entry["dtype"]


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, or all that are there. Empty if there are none."""
    folder = Path(folder)
    index = folder / INDEX_FILE
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise CheckpointError(f"{len(missing)} of the {len(names)} weight files that {index} names are not there: {shown}")
    return [folder / name for name in names]


def _read_header(path: Path) -> dict[str, dict[str, Any]]:
    """A safetensors file: 8 bytes of header length (little endian), the header as JSON, then the tensors' bytes."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        header = json.loads(file.read(length)) if 0 < length <= _MAX_HEADER_BYTES else None
    if header is None:
        raise CheckpointError(f"{path} is not a safetensors file")
    data_bytes = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if path.stat().st_size != 8 + length + data_bytes:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, expected {8 + length + data_bytes}; is the download complete?")
    return header
