"""Byte layouts: sizes, golden pages, and rows in and out of strided pages."""

from __future__ import annotations

import hashlib
from dataclasses import FrozenInstanceError

import pytest
import torch

from vllm_dsv4.quantization.formats import (
    INDEXER_FP8,
    INDEXER_MXFP4,
    PACKED_KV,
    CompressorStateFormat,
    RowFormat,
    cache_format,
)
from vllm_dsv4.reference.numerics import gather_entries, round_trip_entries, scatter_entries

PACKED = {"kv": PACKED_KV, "indexer_fp8": INDEXER_FP8, "indexer_mxfp4": INDEXER_MXFP4}
ROWS = {"bfloat16": RowFormat(48, torch.bfloat16), "float32": RowFormat(48, torch.float32), "float16": RowFormat(7, torch.float16)}
GOLDEN = {
    "kv": ("1f655d1da25c04adad83dd985f754c00a60671e6e0aeea264d823b682bcff4a6", 64, [119, 120, 121, 122, 123, 124, 125, 0]),
    "indexer_fp8": ("f48fabf906c1b28d43e873f7dc582a9e67cf0df4f634679100e7cc5f4e66df6e", 32, [0, 0, 0, 61]),  # 0.03125
    "indexer_mxfp4": ("d387a85bc3553b49a31a0a6874c0a420640ab4059967e7dc0f93000dd4d4ef9f", 32, [125, 126, 127, 128]),
}


def golden_entries(block: int, head_dim: int) -> torch.Tensor:
    """The two entries of model.md 5.2 (block 64, 512 columns) and 5.3 (block 32, 128 columns)."""
    entry, column = torch.arange(2).unsqueeze(1), torch.arange(head_dim)
    return (((37 * column + 101 * entry) % 257 - 128) / 16 * 2.0 ** (column // block - 3)).bfloat16()


def entry_shape(fmt) -> tuple[int, torch.dtype]:
    return (fmt.head_dim, fmt.dtype) if isinstance(fmt, RowFormat) else (fmt.entry_bytes, torch.uint8)


@pytest.mark.parametrize("name", PACKED)
def test_golden_page(name: str, device: torch.device, make_cache) -> None:
    fmt, (digest, block, scale_record) = PACKED[name], GOLDEN[name]
    cache, _ = make_cache(1, 2, fmt.entry_bytes, torch.uint8)
    scatter_entries(cache, torch.tensor([0, 1], device=device), golden_entries(block, fmt.head_dim).to(device))
    page = cache.flatten().cpu()
    assert hashlib.sha256(page.numpy().tobytes()).hexdigest() == digest
    assert page[2 * fmt.data_bytes :].tolist() == 2 * scale_record


def test_golden_page_of_the_compiled_insert(compiled_op) -> None:
    insert = compiled_op("fused_qnorm_rope_kv_insert_cpu")
    page, tokens = torch.zeros(1, 1168, dtype=torch.uint8), golden_entries(64, 512)
    position, cos_sin = torch.zeros(2, dtype=torch.long), torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)
    insert(tokens.unsqueeze(1), tokens, position, page, torch.arange(2), cos_sin, 1, 1e-6, 2)
    assert hashlib.sha256(page.numpy().tobytes()).hexdigest() == GOLDEN["kv"][0]


@pytest.mark.parametrize(
    ("fmt", "num_entries", "content", "page"),
    [
        (PACKED_KV, 64, 37376, 37440),
        (PACKED_KV, 256, 149504, 149760),
        (PACKED_KV, 2, 1168, 1728),
        (INDEXER_FP8, 64, 8448, 8640),
        (INDEXER_MXFP4, 64, 4352, 4608),
        (CompressorStateFormat(512, 4), 4, 32768, 32832),
        (CompressorStateFormat(512, 128), 8, 32768, 32832),
        (CompressorStateFormat(128, 4), 4, 8192, 8640),
        (RowFormat(512, torch.float32), 3, 6144, 6144),
    ],
)
def test_page_sizes(fmt, num_entries: int, content: int, page: int) -> None:
    assert fmt.entry_bytes * num_entries == content
    assert fmt.page_bytes(num_entries) == page


@pytest.mark.parametrize(("head_dim", "ratio", "row_dim", "window"), [(512, 4, 2048, 8), (128, 4, 512, 8), (512, 128, 1024, 128)])
def test_compressor_state(head_dim: int, ratio: int, row_dim: int, window: int) -> None:
    fmt = CompressorStateFormat(head_dim, ratio)
    assert (fmt.row_dim, fmt.window) == (row_dim, window)


def test_cache_format() -> None:
    for fmt in PACKED.values():
        assert cache_format(torch.uint8, fmt.entry_bytes) is fmt
    assert cache_format(torch.float32, 96) == RowFormat(96, torch.float32)
    with pytest.raises(ValueError, match="585"):
        cache_format(torch.uint8, 585)
    with pytest.raises(ValueError, match="int8"):
        cache_format(torch.int8, 584)
    with pytest.raises(FrozenInstanceError):
        PACKED_KV.tile = 32  # type: ignore[misc]


@pytest.mark.parametrize("fmt", [*PACKED.values(), *ROWS.values()], ids=[*PACKED, *ROWS])
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_entries_survive_strided_pages(fmt, page_size: int, generator: torch.Generator, device: torch.device, make_cache) -> None:
    entry, dtype = entry_shape(fmt)
    num_pages = 7
    cache, storage = make_cache(num_pages, page_size, entry, dtype)
    capacity = num_pages * page_size
    slots = torch.randperm(capacity, generator=generator)[: capacity // 2 + 1]
    skipped = torch.rand(len(slots), generator=generator) < 0.3
    x = torch.randn(len(slots), fmt.head_dim, generator=generator).to(fmt.value_dtype).to(device)
    before = storage.clone()
    scatter_entries(cache, slots.masked_fill(skipped, -1).to(device), x)

    written, kept = slots[~skipped], x[~skipped.to(device)]
    expected = round_trip_entries(kept, fmt)
    read = gather_entries(cache, written.to(device))
    assert torch.equal(read, expected)
    assert (read - kept.float()).abs().max() <= 0.3 * kept.abs().max()  # E2M1 is the coarsest: half a step of 2 in 6
    # Nothing outside the written entries' bytes has changed.
    untouched = torch.ones(num_pages, storage.shape[1], dtype=torch.bool)
    for slot in written.tolist():
        page, index = divmod(slot, page_size)
        data = getattr(fmt, "data_bytes", fmt.entry_bytes)
        untouched[page, index * data : (index + 1) * data] = False
        scale = fmt.entry_bytes - data
        untouched[page, page_size * data + index * scale : page_size * data + (index + 1) * scale] = False
    assert torch.equal(storage.cpu()[untouched], before.cpu()[untouched])


@pytest.mark.parametrize("fmt", [*PACKED.values(), *ROWS.values()], ids=[*PACKED, *ROWS])
def test_absent_slots(fmt, device: torch.device, make_cache) -> None:
    entry, dtype = entry_shape(fmt)
    cache, storage = make_cache(2, 3, entry, dtype)  # every byte is NaN: reading slot 0 for -1 would show
    before = storage.clone()
    none = torch.full((4, 2), -1, dtype=torch.int32, device=device)
    read = gather_entries(cache, none)
    assert read.shape == (4, 2, fmt.head_dim) and not read.any()
    scatter_entries(cache, none[:, 0].long(), torch.ones(4, fmt.head_dim, dtype=fmt.value_dtype, device=device))
    scatter_entries(cache, none[:0, 0].long(), torch.ones(0, fmt.head_dim, dtype=fmt.value_dtype, device=device))
    assert torch.equal(storage, before)
    assert gather_entries(cache, none[:0]).shape == (0, 2, fmt.head_dim)


def test_slots_beyond_32_bit_bytes() -> None:
    # Only the touched pages of this 5 GiB cache are ever backed by memory.
    stride, page = 37440, 140_000
    storage = torch.empty(page + 1, stride, dtype=torch.uint8)
    cache = storage[:, : 64 * 584].unflatten(1, (64, 584))
    x = golden_entries(64, 512)
    scatter_entries(cache, torch.tensor([page * 64 + 5, page * 64 + 63]), x)
    assert torch.equal(gather_entries(cache, torch.tensor([page * 64 + 5, page * 64 + 63])), round_trip_entries(x, PACKED_KV))
    assert storage[page, 64 * 576 + 5 * 8 : 64 * 576 + 6 * 8].tolist() == GOLDEN["kv"][2]
