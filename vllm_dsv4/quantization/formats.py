"""The byte layouts of every cache of the model, written down once (model.md 5.2, 5.3, 3.8).

A cache tensor is ``[num_pages, page_size, entry]``: contiguous inside a page, with a page stride that may exceed the page's
content (alignment, or several layers' caches side by side), so bytes are addressed as ``page * stride(0) + offset``.

Packed formats keep, inside a page of ``n`` entries, all data first and then all scale records::

    byte 0 ................. data_bytes * n - 1     data of entry i at data_bytes * i
    byte data_bytes * n .... entry_bytes * n - 1    scale record of entry i at data_bytes * n + scale_bytes * i
    byte entry_bytes * n ... page stride - 1        padding, never read or written

so row ``i`` of the ``[num_pages, page_size, entry_bytes]`` view is *not* entry ``i``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE_ALIGNMENT = 576
"""Every page's stride is a multiple of this many bytes: the data stride of a packed KV entry, as FlashMLA's kernels want it."""

BLOCK_SIZE = 256
"""Tokens in a page of the entry caches: 64 entries of ratio 4, 2 of ratio 128. It is what vLLM calls the block size."""

WINDOW_BLOCK_SIZE = 64
"""Tokens in a page of the window cache."""

STATE_BLOCK_SIZE = {4: 4, 128: 8}
"""Tokens in a page of compressor state, by ratio: pages of about the size of the other caches' (model.md 5.2)."""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class PackedFormat:
    """What the packed formats share; see the module's docstring for the page layout. All sizes are in bytes unless named otherwise."""

    head_dim: int
    """Values in an entry."""
    data_bytes: int
    scale_bytes: int

    @property
    def entry_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    @property
    def value_dtype(self) -> torch.dtype:
        """The model's dtype: values are rounded to it before they are quantised."""
        return torch.bfloat16

    def page_bytes(self, num_entries: int) -> int:
        """Bytes from one page of ``num_entries`` entries to the next, when nothing else shares the page."""
        return _round_up(self.entry_bytes * num_entries, PAGE_ALIGNMENT)


@dataclass(frozen=True)
class PackedKVFormat(PackedFormat):
    """A window or compressed KV entry of 584 bytes, in FlashMLA's page layout (model.md 5.2).

    Data, 576 bytes::

        byte   0 .. 447    448 float8_e4m3fn: the part without RoPE, 7 tiles of 64 values that share a scale
        byte 448 .. 575    64 bfloat16, little endian: the rotated part, not quantised

    Scale record, 8 bytes::

        byte   0 ..   6    one UE8M0 byte a tile: value = e4m3 * 2^(byte - 127)
        byte   7           0
    """

    nope_dim: int = 448
    rope_dim: int = 64
    tile: int = 64
    head_dim: int = 512
    data_bytes: int = 576
    scale_bytes: int = 8

    @property
    def num_tiles(self) -> int:
        return self.nope_dim // self.tile


@dataclass(frozen=True)
class IndexerFP8Format(PackedFormat):
    """An indexer key of 132 bytes (model.md 5.3).

    Data: 128 float8_e4m3fn. Scale record: one float32, little endian, a power of two; value = e4m3 * scale.
    """

    head_dim: int = 128
    data_bytes: int = 128
    scale_bytes: int = 4


@dataclass(frozen=True)
class IndexerMXFP4Format(PackedFormat):
    """An indexer key, rotated by the Hadamard matrix, of 68 bytes (model.md 5.3).

    Data, 64 bytes: byte k holds the E2M1 code of column 2k in its low nibble and of column 2k + 1 in its high nibble.
    Scale record, 4 bytes: one UE8M0 byte for each block of 32 columns; value = e2m1 * 2^(byte - 127).
    """

    block: int = 32
    head_dim: int = 128
    data_bytes: int = 64
    scale_bytes: int = 4


@dataclass(frozen=True)
class RowFormat:
    """Plain rows: entry ``i`` of a page is row ``i``, ``head_dim`` values of ``dtype``, no scales and no alignment."""

    head_dim: int
    dtype: torch.dtype

    @property
    def entry_bytes(self) -> int:
        return self.head_dim * self.dtype.itemsize

    @property
    def value_dtype(self) -> torch.dtype:
        return self.dtype

    def page_bytes(self, num_entries: int) -> int:
        return self.entry_bytes * num_entries


@dataclass(frozen=True)
class CompressorStateFormat:
    """A compressor's state: one float32 row a token, which later windows are pooled from (model.md 3.5, 3.8).

    Row, ``2 * width`` float32::

        float 0     .. width - 1        the token's projected value
        float width .. 2 * width - 1    its gate, with ape[position mod compress_ratio] already added

    At ratio 4 ``width`` is twice the entry's ``head_dim``, since windows overlap: the first half of value and gate is the
    token's share in the NEXT window's entry, the second half its share in its OWN window's entry. At ratio 128 they are equal.
    """

    head_dim: int
    compress_ratio: int

    @property
    def width(self) -> int:
        return self.head_dim * (2 if self.compress_ratio == 4 else 1)

    @property
    def row_dim(self) -> int:
        """Floats in a row: the last dimension of the state cache."""
        return 2 * self.width

    @property
    def entry_bytes(self) -> int:
        return self.row_dim * torch.float32.itemsize

    @property
    def window(self) -> int:
        """Tokens that one entry is pooled from, hence the rows that must be kept: 8 at ratio 4, else the ratio."""
        return 2 * self.compress_ratio if self.compress_ratio == 4 else self.compress_ratio

    def page_bytes(self, num_entries: int) -> int:
        return _round_up(self.entry_bytes * num_entries, PAGE_ALIGNMENT)


PACKED_KV = PackedKVFormat()
INDEXER_FP8 = IndexerFP8Format()
INDEXER_MXFP4 = IndexerMXFP4Format()

CacheFormat = PackedFormat | RowFormat

_PACKED_FORMATS: dict[int, PackedFormat] = {fmt.entry_bytes: fmt for fmt in (PACKED_KV, INDEXER_FP8, INDEXER_MXFP4)}


def cache_format(dtype: torch.dtype, entry: int) -> CacheFormat:
    """The format of a cache tensor ``[num_pages, page_size, entry]`` of dtype ``dtype``.

    Raises:
        ValueError: uint8 with a size that no packed format has, or a dtype that no cache has.
    """
    if dtype == torch.uint8:
        if entry not in _PACKED_FORMATS:
            raise ValueError(f"a uint8 cache must have entries of {sorted(_PACKED_FORMATS)} bytes, got {entry}; check the cache's shape")
        return _PACKED_FORMATS[entry]
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"a cache must be uint8 (packed) or bfloat16, float16 or float32 (plain rows), got {dtype}")
    return RowFormat(head_dim=entry, dtype=dtype)
