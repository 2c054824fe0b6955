"""Number formats, quantisers and cache rows that the reference ops share (model.md 2.1, 2.2, 5.1-5.3).

Every function works on any leading shape, without loops over rows, and each row's result depends on that row alone.
Values given to a quantiser must already be rounded to the model's dtype (bfloat16, float16 or float32): float32 holds them
and their quotients by a power of two exactly, so the quantiser's only rounding is the one to the target format.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_dsv4.quantization.formats import (
    CacheFormat,
    IndexerFP8Format,
    IndexerMXFP4Format,
    PackedFormat,
    PackedKVFormat,
    RowFormat,
    cache_format,
)

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = 6.0 * 2.0**-126
WEIGHT_BLOCK = 128
MXFP4_BLOCK = 32
_TILE_ELEMENTS = 1 << 20


def row_tiles(num_rows: int, row_elements: int) -> Iterator[slice]:
    """Slices of rows with about a million elements each: what a reference op widens to float64 at a time."""
    step = max(1, _TILE_ELEMENTS // max(1, row_elements))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def rms_normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x · rsqrt(mean(x²) + eps)`` over the last dimension, in ``x``'s dtype and without a weight (model.md 3.1)."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def ue8m0_exponent(x: torch.Tensor) -> torch.Tensor:
    """ceil(log2(x)) of positive float32 ``x``, exactly, from its bits (model.md 5.1) → int32.

    The rule is the exponent field - 127, plus 1 if the mantissa is non-zero; so infinity gives 128 and NaN 129.
    """
    bits = x.view(torch.int32)
    return ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).int()


def fp8_scale_exponent(amax: torch.Tensor) -> torch.Tensor:
    """Exponent e of the scale 2^e that an E4M3 group of largest magnitude ``amax`` (float32) gets (model.md 5.1) → int32, ≥ -22."""
    return ue8m0_exponent(amax.float().clamp(min=FP8_AMAX_FLOOR) * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32, device=amax.device))


def fp4_scale_exponent(amax: torch.Tensor) -> torch.Tensor:
    """Exponent e of the scale 2^e that an E2M1 block of largest magnitude ``amax`` (float32) gets (model.md 5.3) → int32, ≥ -126."""
    return ue8m0_exponent(amax.float().clamp(min=FP4_AMAX_FLOOR) * torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32, device=amax.device))


def exponent_to_e8m0(exponent: torch.Tensor) -> torch.Tensor:
    """The E8M0 byte of 2^exponent → uint8; exponents beyond 127, of groups with infinities or NaN, give 255, which is NaN."""
    return (exponent + 127).clamp(0, 255).to(torch.uint8)


def e8m0_to_float(byte: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) of uint8 ``byte``, exactly → float32. Byte 255 is NaN, byte 0 the subnormal 2^-127."""
    bits = byte.int() << 23
    bits = torch.where(byte == 0, 1 << 22, bits)
    return torch.where(byte == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def float_to_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """The E8M0 byte of each float32 power of two in 2^-127 .. 2^127 → uint8, exactly. Other values are not representable.

    Raises:
        ValueError: a value is not such a power of two.
    """
    bits = scale.float().contiguous().view(torch.int32)
    byte = (bits >> 23).to(torch.uint8)
    bad = e8m0_to_float(byte) != scale
    if bad.any():
        raise ValueError(f"E8M0 holds powers of two from 2^-127 to 2^127, got {scale[bad][0].item()}; keep these scales in float32")
    return byte


def quantize_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Clamp to ±448, then round to nearest even → float8_e4m3fn. ``x`` is float32 or narrower: float64 would round twice."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Clamp to ±6, then round to nearest even → E2M1 codes 0..15 (uint8): bit 3 is the sign, bits 0-2 index ``E2M1_VALUES``."""
    magnitude = x.float().abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    # A tie goes to the even code: up (>=) from an odd code, down (>) from an even one.
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        code += magnitude > midpoint
    for midpoint in (0.75, 1.75, 3.5):
        code += magnitude >= midpoint
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """Values of E2M1 codes 0..15 → float32."""
    magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=code.device)
    return torch.cat((magnitudes, -magnitudes))[code.long()]


def pack_nibbles(code: torch.Tensor) -> torch.Tensor:
    """Codes [..., K] uint8 → bytes [..., K/2]: the even column in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(byte: torch.Tensor) -> torch.Tensor:
    """Bytes [..., K/2] uint8 → codes [..., K]: the low nibble is the even column."""
    return torch.stack((byte & 0xF, byte >> 4), dim=-1).flatten(-2)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """``x · H / sqrt(n)`` over the last dimension (n a power of two), H in Sylvester order (model.md 3.6), in ``x``'s dtype."""
    n = x.shape[-1]
    if n & (n - 1) or n == 0:
        raise ValueError(f"the Hadamard transform needs a last dimension that is a power of two, got {n}")
    y = x
    stride = 1
    while stride < n:
        pair = y.unflatten(-1, (n // (2 * stride), 2, stride))
        low, high = pair[..., 0, :], pair[..., 1, :]
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        stride *= 2
    return y * n**-0.5


def quantize_fp8_groups(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one power-of-two scale for each ``group_size`` values of the last dimension (model.md 5.1).

    Returns ``(q [..., K] float8_e4m3fn, exponent [..., K / group_size] int32)``; value ≈ q · 2^exponent. An infinity or a NaN in
    a group gives it an exponent above 127, whose scale makes the whole group NaN.
    """
    groups = x.float().unflatten(-1, (-1, group_size))
    exponent = fp8_scale_exponent(groups.abs().amax(-1))
    return quantize_e4m3(groups / e8m0_to_float(exponent_to_e8m0(exponent)).unsqueeze(-1)).flatten(-2), exponent


def fp8_round_trip(x: torch.Tensor, group_size: int = WEIGHT_BLOCK) -> torch.Tensor:
    """An activation [..., K] as an FP8 linear layer sees it → float64, exactly; a last group may be short (model.md 5.1)."""
    columns = x.shape[-1]
    q, exponent = quantize_fp8_groups(torch.nn.functional.pad(x, (0, -columns % group_size)), group_size)
    scale = e8m0_to_float(exponent_to_e8m0(exponent)).double()
    return (q.double().unflatten(-1, (-1, group_size)) * scale.unsqueeze(-1)).flatten(-2)[..., :columns]


def quantize_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 with one power-of-two scale for each 32 values of the last dimension (model.md 5.3).

    Returns ``(packed [..., K/2] uint8, e8m0 [..., K/32] uint8)``.
    """
    blocks = x.float().unflatten(-1, (-1, MXFP4_BLOCK))
    sf = exponent_to_e8m0(fp4_scale_exponent(blocks.abs().amax(-1)))
    code = quantize_e2m1(blocks / e8m0_to_float(sf).unsqueeze(-1))
    return pack_nibbles(code.flatten(-2)), sf


def dequantize_mxfp4(packed: torch.Tensor, sf: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Packed E2M1 [..., K/2] uint8 with E8M0 scales [..., K/32] uint8 → values [..., K] (model.md 2.2)."""
    blocks = decode_e2m1(unpack_nibbles(packed)).unflatten(-1, (-1, MXFP4_BLOCK))
    return (blocks.to(dtype) * e8m0_to_float(sf).to(dtype).unsqueeze(-1)).flatten(-2)


def dequantize_block_fp8(weight: torch.Tensor, weight_sf: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Block-FP8 weights [..., N, K] with float32 scales [..., ceil(N/128), ceil(K/128)] → values [..., N, K] (model.md 2.1).

    Exact in float32 when the scales are powers of two, in float64 always.
    """
    rows, columns = weight.shape[-2:]
    sf = weight_sf.to(dtype).repeat_interleave(WEIGHT_BLOCK, -2)[..., :rows, :]
    return weight.to(dtype) * sf.repeat_interleave(WEIGHT_BLOCK, -1)[..., :columns]


def encode_entries(x: torch.Tensor, fmt: PackedFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries ``x`` [N, head_dim] (in the model's dtype) → ``(data [N, data_bytes], scales [N, scale_bytes])``, both uint8.

    ``IndexerMXFP4Format`` expects ``x`` after the Hadamard rotation.
    """
    if isinstance(fmt, PackedKVFormat):
        q, exponent = quantize_fp8_groups(x[:, : fmt.nope_dim], fmt.tile)
        rope = x[:, fmt.nope_dim :].to(torch.bfloat16).contiguous()
        sf = exponent_to_e8m0(exponent)
        return torch.cat((q.view(torch.uint8), rope.view(torch.uint8)), -1), torch.cat((sf, torch.zeros_like(sf[:, :1])), -1)
    if isinstance(fmt, IndexerFP8Format):
        q, exponent = quantize_fp8_groups(x, fmt.head_dim)
        sf = e8m0_to_float(exponent_to_e8m0(exponent)).flatten()
        return q.view(torch.uint8), sf.view(torch.uint8).view(len(x), fmt.scale_bytes)
    assert isinstance(fmt, IndexerMXFP4Format)
    return quantize_mxfp4(x)


def decode_entries(data: torch.Tensor, scales: torch.Tensor, fmt: PackedFormat) -> torch.Tensor:
    """The inverse of ``encode_entries``, exactly → float32 [N, head_dim]."""
    if isinstance(fmt, PackedKVFormat):
        nope = data[:, : fmt.nope_dim].view(torch.float8_e4m3fn).float().unflatten(-1, (fmt.num_tiles, fmt.tile))
        nope = nope * e8m0_to_float(scales[:, : fmt.num_tiles]).unsqueeze(-1)
        rope = data[:, fmt.nope_dim :].contiguous().view(torch.bfloat16).float()
        return torch.cat((nope.flatten(-2), rope), -1)
    if isinstance(fmt, IndexerFP8Format):
        return data.view(torch.float8_e4m3fn).float() * scales.contiguous().view(torch.float32)
    assert isinstance(fmt, IndexerMXFP4Format)
    return dequantize_mxfp4(data, scales)


def round_trip_entries(x: torch.Tensor, fmt: CacheFormat) -> torch.Tensor:
    """What reading returns after writing entries ``x`` [N, head_dim] to a cache of this format → float32 [N, head_dim]."""
    if isinstance(fmt, RowFormat):
        return x.to(fmt.dtype).float()
    return decode_entries(*encode_entries(x, fmt), fmt)


def _page_views(cache: torch.Tensor, fmt: PackedFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """``(data [pages, page_size, data_bytes], scales [pages, page_size, scale_bytes])`` as views that keep the page stride."""
    num_pages, page_size, _ = cache.shape
    page = cache.view(num_pages, page_size * fmt.entry_bytes)
    data, scales = page.split((page_size * fmt.data_bytes, page_size * fmt.scale_bytes), dim=1)
    return data.view(num_pages, page_size, fmt.data_bytes), scales.view(num_pages, page_size, fmt.scale_bytes)


def gather_entries(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Entries at ``slots`` (any shape, integer) of a cache of any format → float32 [*slots.shape, head_dim]; -1 gives zeros.

    ``cache`` is ``[pages, page_size, entry]``, slot = page · page_size + index in the page; the page stride may exceed the content.
    """
    fmt = cache_format(cache.dtype, cache.shape[-1])
    flat = slots.reshape(-1).long()
    valid = flat >= 0
    page, index = torch.where(valid, flat, 0).div(cache.shape[1], rounding_mode="floor"), torch.where(valid, flat, 0) % cache.shape[1]
    if isinstance(fmt, RowFormat):
        values = cache[page, index].float()
    else:
        data, scales = _page_views(cache, fmt)
        values = decode_entries(data[page, index], scales[page, index], fmt)
    return values.masked_fill(~valid.unsqueeze(-1), 0.0).view(*slots.shape, fmt.head_dim)


def scatter_entries(cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
    """Quantise entries ``x`` [N, head_dim] (in the model's dtype) and write them at ``slots`` [N] of a cache of any format; -1 skips.

    For 68-byte MXFP4 entries ``x`` must already be rotated by ``hadamard``.
    """
    fmt = cache_format(cache.dtype, cache.shape[-1])
    valid = slots >= 0
    slots, x = slots[valid].long(), x[valid]
    page, index = slots.div(cache.shape[1], rounding_mode="floor"), slots % cache.shape[1]
    if isinstance(fmt, RowFormat):
        cache[page, index] = x.to(fmt.dtype)
        return
    data, scales = _page_views(cache, fmt)
    data[page, index], scales[page, index] = encode_entries(x, fmt)
