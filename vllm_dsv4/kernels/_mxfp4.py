"""MXFP4 weights as operands of bfloat16 dot products: exact, a few instructions for eight weights."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_dsv4.kernels._fp8 import decode_e2m1, pow2

UNDO_SHIFT = tl.constexpr(2.0**64)
"""What a sum of products with ``unpack_mxfp4``'s values must be multiplied by."""

# A 32-bit register of four bytes and their scales -> pairs of bfloat16: bytes (0, 1) and (2, 3), low nibbles, then high ones. A
# nibble's sign moves to bit 15 and its other three bits to bits 8..6: exponent and mantissa of a bfloat16 that is 2^-126 times as
# large, subnormal for 0.5. The product with the scale makes up for that: a fused multiply-add to -0, since this instruction is
# on every GPU with bfloat16.
_UNPACK = tl.constexpr("""
{
    .reg .b32 p, q, s, t, zero;
    mov.b32 zero, 0x80008000;
    prmt.b32 p, $4, 0, 0x1100;
    prmt.b32 q, $4, 0, 0x3322;
    shl.b32 s, p, 4;
    shr.b32 t, p, 2;
    and.b32 s, s, 0x80008000;
    lop3.b32 t, t, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $0, t, $5, zero;
    shl.b32 s, q, 4;
    shr.b32 t, q, 2;
    and.b32 s, s, 0x80008000;
    lop3.b32 t, t, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $1, t, $6, zero;
    shr.b32 t, p, 6;
    and.b32 s, p, 0x80008000;
    lop3.b32 t, t, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $2, t, $5, zero;
    shr.b32 t, q, 6;
    and.b32 s, q, 0x80008000;
    lop3.b32 t, t, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $3, t, $6, zero;
}
""")


@triton.jit
def unpack_mxfp4(packed, sf, DTYPE: tl.constexpr):
    """Packed E2M1 uint8 [N, K/2] and E8M0 bytes (any integer type) [N, K/32] → even and odd columns, each [N, K/2] DTYPE,
    times 2^-64.

    This shift, which ``UNDO_SHIFT`` takes back from the sum of products, keeps both factors of a weight in bfloat16's range. A
    scale of 2^66 or more counts as infinite; below 2^-61 bits may be lost.
    """
    ROWS: tl.constexpr = packed.shape[0]
    BYTES: tl.constexpr = packed.shape[1]
    exponent = tl.minimum(sf.to(tl.int32) + 62, 255)
    if tl.bfloat16 == DTYPE:
        scale = (exponent << 7).to(tl.uint16)
        scale = tl.broadcast_to(scale[:, :, None], (ROWS, BYTES // 16, 16)).reshape(ROWS, BYTES)
        low, high = tl.inline_asm_elementwise(_UNPACK, "=&r,=&r,=&r,=&r,r,r,r", [packed, scale], (tl.bfloat16, tl.bfloat16), True, 4)
    else:
        scale = pow2(exponent - 127)
        scale = tl.broadcast_to(scale[:, :, None], (ROWS, BYTES // 16, 16)).reshape(ROWS, BYTES)
        low = (decode_e2m1(packed & 15).to(tl.float32) * 2.0**-126 * scale).to(DTYPE)
        high = (decode_e2m1(packed >> 4).to(tl.float32) * 2.0**-126 * scale).to(DTYPE)
    return low, high
