"""float8_e4m3fn, UE8M0 and E2M1 on the device: exact, with or without hardware conversion.

Kernels read and write FP8 as uint8 and convert here. ``HW_FP8`` (see ``_launch.has_fp8``) is a compile-time choice; both
variants give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(x, HW_FP8: tl.constexpr):
    """float32 → uint8: to nearest, ties to even, subnormals kept, |x| > 448 saturates, NaN becomes NaN (0x7F with either sign)."""
    if HW_FP8:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 448; the comparison of integers keeps NaN, which is larger than any number.
    saturated = tl.where((magnitude > 0x43E00000) & (magnitude <= 0x7F800000), 0x43E00000, magnitude)
    normal = ((saturated + 0x7FFFF + ((saturated >> 20) & 1)) >> 20) - (120 << 3)
    # One unit in the last place of 2^14 is 2^-9, the smallest subnormal: the addition rounds to a multiple of it.
    subnormal = (saturated.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(saturated < 0x3C800000, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(code, HW_FP8: tl.constexpr):
    """uint8 → float16, which holds every e4m3 number; NaN (0x7F, 0xFF) stays NaN."""
    if HW_FP8:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = code.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    # The exponent's bias is 15 in float16 and 7 in e4m3.
    value = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def decode_e2m1(nibble):
    """The low four bits of an integer → float16: ±0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    wide = nibble.to(tl.uint16)
    bits = ((wide & 0x8) << 12) | ((wide & 0x7) << 9)
    # The exponent's bias is 15 in float16 and 1 in e2m1.
    return bits.to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def pow2(exponent):
    """int32 in [-126, 127] → float32 2^exponent."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_e8m0(code):
    """uint8 → float32 2^(code - 127); 0 is 2^-127, a subnormal, and 255 is NaN."""
    wide = code.to(tl.int32)
    return tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23)).to(tl.float32, bitcast=True)


@triton.jit
def ceil_log2(x):
    """Smallest int32 e with 2^e >= x, for a normal float32 x > 0: exact, from the bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) >> 23) - 127


@triton.jit
def largest_magnitude(x, axis: tl.constexpr):
    """max |x| over ``axis`` of float32 ``x``; NaN if any is NaN, since as integers those are larger than infinity."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=axis).to(tl.float32, bitcast=True)


@triton.jit
def fp8_scale_exponent(amax):
    """Exponent of the power-of-two scale of an e4m3 group: ceil(log2(max(amax, 1e-4) / 448)) (model.md 5.1); at least 120 for
    infinities and NaN."""
    floored = tl.where(amax < 1e-4, 1e-4, amax)  # keeps NaN
    bits = (floored * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    return ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def quantize_e4m3(x, exponent, HW_FP8: tl.constexpr):
    """float32 ``x`` of a group whose scale is 2^``exponent`` (same shape) → uint8 e4m3 codes; NaN where the scale is."""
    # The inverse of a finite group's scale, 2^-22 .. 2^120, is exact.
    inverse = tl.where(exponent > 126, float("nan"), pow2(-exponent))
    return encode_e4m3(x * inverse, HW_FP8)
