"""Writing an entry to a cache of any format (``quantization/formats.py`` has the byte layouts)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._fp8 import decode_e8m0, fp8_scale_exponent, largest_magnitude, pow2, quantize_e4m3
from vllm_dsv4.quantization.formats import (
    INDEXER_FP8,
    INDEXER_MXFP4,
    PACKED_KV,
    IndexerFP8Format,
    IndexerMXFP4Format,
    PackedKVFormat,
    cache_format,
)

ROWS = tl.constexpr(0)
PACKED_KV_BYTES = tl.constexpr(PACKED_KV.entry_bytes)
INDEXER_FP8_BYTES = tl.constexpr(INDEXER_FP8.entry_bytes)
INDEXER_MXFP4_BYTES = tl.constexpr(INDEXER_MXFP4.entry_bytes)
"""What the kernels call a format: the bytes of a packed entry, or 0 for plain rows."""

_KV_DATA = tl.constexpr(PACKED_KV.data_bytes)
_KV_SCALES = tl.constexpr(PACKED_KV.scale_bytes)
_KV_NOPE = tl.constexpr(PACKED_KV.nope_dim)
_KV_TILE = tl.constexpr(PACKED_KV.tile)
_FP8_DATA = tl.constexpr(INDEXER_FP8.data_bytes)
_FP8_SCALES = tl.constexpr(INDEXER_FP8.scale_bytes)
_MXFP4_DATA = tl.constexpr(INDEXER_MXFP4.data_bytes)
_MXFP4_SCALES = tl.constexpr(INDEXER_MXFP4.scale_bytes)
_MXFP4_BLOCK = tl.constexpr(INDEXER_MXFP4.block)

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def entry_options(cache: torch.Tensor) -> dict[str, object]:
    """The compile-time arguments that ``store_entry`` takes for ``cache`` [num_pages, page_size, entry].

    Raises:
        ValueError: the cache has no known format.
    """
    fmt = cache_format(cache.dtype, cache.shape[-1])
    packed = isinstance(fmt, PackedKVFormat | IndexerFP8Format | IndexerMXFP4Format)
    return {
        "FORMAT": fmt.entry_bytes if packed else 0,
        "PAGE_SIZE": cache.shape[1],
        "DIM": fmt.head_dim,
        "DTYPE": _TRITON_DTYPES[fmt.value_dtype],
    }


@triton.jit
def store_entry(
    cache_ptr,
    stride_page,
    slot,
    even,
    odd,
    FORMAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    HW_FP8: tl.constexpr,
):
    """Quantise an entry and write it at ``slot`` >= 0 (int64).

    ``even`` and ``odd``: float32 [next_power_of_2(DIM) / 2], the entry's columns, already rounded to the format's value dtype
    (and, for MXFP4, multiplied by the Hadamard matrix); beyond DIM anything.
    """
    page = cache_ptr + (slot // PAGE_SIZE) * stride_page
    index = slot % PAGE_SIZE
    if FORMAT == ROWS:
        x = tl.interleave(even, odd)
        column = tl.arange(0, x.shape[0])
        tl.store(page + index * DIM + column, x.to(cache_ptr.dtype.element_ty), mask=column < DIM)
    elif FORMAT == PACKED_KV_BYTES:
        _store_packed_kv(page, index, tl.interleave(even, odd), PAGE_SIZE, DIM, HW_FP8)
    elif FORMAT == INDEXER_FP8_BYTES:
        _store_indexer_fp8(page, index, tl.interleave(even, odd), PAGE_SIZE, DIM, HW_FP8)
    else:
        tl.static_assert(FORMAT == INDEXER_MXFP4_BYTES)
        _store_indexer_mxfp4(page, index, even, odd, PAGE_SIZE, DIM)


@triton.jit
def _store_packed_kv(page, index, x, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, HW_FP8: tl.constexpr):
    data = page + index * _KV_DATA
    tiles = x.reshape(DIM // _KV_TILE, _KV_TILE)
    tile = tl.arange(0, DIM // _KV_TILE)
    column = tile[:, None] * _KV_TILE + tl.arange(0, _KV_TILE)[None, :]
    exponent = fp8_scale_exponent(largest_magnitude(tiles, 1))
    tl.store(data + column, quantize_e4m3(tiles, exponent[:, None], HW_FP8), mask=column < _KV_NOPE)
    rope = (data + _KV_NOPE).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    tl.store(rope + (column - _KV_NOPE), tiles.to(tl.bfloat16), mask=column >= _KV_NOPE)
    scale = tl.where(tile < _KV_NOPE // _KV_TILE, tl.minimum(exponent + 127, 255), 0)
    tl.store(page + PAGE_SIZE * _KV_DATA + index * _KV_SCALES + tile, scale.to(tl.uint8))


@triton.jit
def _store_indexer_fp8(page, index, x, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, HW_FP8: tl.constexpr):
    exponent = fp8_scale_exponent(largest_magnitude(x, 0))
    tl.store(page + index * _FP8_DATA + tl.arange(0, DIM), quantize_e4m3(x, exponent, HW_FP8))
    scale = (page + PAGE_SIZE * _FP8_DATA + index * _FP8_SCALES).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(scale, decode_e8m0(tl.minimum(exponent + 127, 255)))


@triton.jit
def _store_indexer_mxfp4(page, index, even, odd, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr):
    BLOCKS: tl.constexpr = DIM // _MXFP4_BLOCK
    BYTES: tl.constexpr = _MXFP4_BLOCK // 2
    even = even.reshape(BLOCKS, BYTES)
    odd = odd.reshape(BLOCKS, BYTES)
    amax = tl.maximum(largest_magnitude(even, 1), largest_magnitude(odd, 1), propagate_nan=tl.PropagateNan.ALL)
    exponent = fp4_scale_exponent(amax)
    inverse = tl.where(exponent > 126, float("nan"), pow2(-exponent))[:, None]
    code = encode_e2m1(even * inverse) | (encode_e2m1(odd * inverse) << 4)
    block = tl.arange(0, BLOCKS)
    byte = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    tl.store(page + index * _MXFP4_DATA + byte, code.to(tl.uint8))
    scale = tl.minimum(exponent + 127, 255)
    tl.store(page + PAGE_SIZE * _MXFP4_DATA + index * _MXFP4_SCALES + block, scale.to(tl.uint8))


@triton.jit
def fp4_scale_exponent(amax):
    """Exponent of the power-of-two scale of an E2M1 block: ceil(log2(max(amax, 6 * 2^-126) / 6)) (model.md 5.3)."""
    smallest: tl.constexpr = 6.0 * 2.0**-126
    floored = tl.where(amax < smallest, smallest, amax)  # keeps NaN
    bits = (floored * (1.0 / 6.0)).to(tl.int32, bitcast=True)
    return ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def encode_e2m1(x):
    """float32 → int32 E2M1 codes: to nearest, ties to even, |x| > 6 saturates."""
    magnitude = tl.abs(x)
    # A tie goes to the even code: up (>=) from an odd code, down (>) from an even one.
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
    code += (magnitude >= 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def hadamard(x):
    """``x · H / sqrt(n)`` of float32 ``x`` [n], n = 128, H in Sylvester order: the products with H_16 and H_8 that it factors into."""
    x = x.reshape(8, 16)
    x = tl.sum(x[:, :, None] * _sylvester(16)[None, :, :], axis=1)
    x = tl.sum(x[:, None, :] * _sylvester(8)[:, :, None], axis=0)
    return x.reshape(128) * 128**-0.5


@triton.jit
def _sylvester(SIZE: tl.constexpr):
    """[SIZE, SIZE] of +1 and -1: minus where row and column have an odd number of common bits; SIZE <= 16."""
    index = tl.arange(0, SIZE)
    common = index[:, None] & index[None, :]
    common ^= common >> 2
    common ^= common >> 1
    return 1.0 - 2.0 * (common & 1).to(tl.float32)
