# SPDX-License-Identifier: Apache-2.0
"""Bytes of two nibbles each, as `quantized.py` packs them, to 16-bit numbers in registers.

On NVIDIA a word of eight nibbles is unpacked by four lop3 that set the exponent bits around a nibble, and four
subtractions of the exponent's value and the zero point. Elsewhere, and in the interpreter, by shifts and conversions; both are tested
against the same definition, the assembly by a small model of its instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Four bytes in, eight 16-bit numbers out. $0 and $1 are the low nibbles, $2 and $3 the high ones, minus 8 or the zero points in $5.
# 0x4300 is 128 in bfloat16 and 0x6400 is 1024 in float16: there the last mantissa bit is worth 1, so or-ing in a nibble
# adds it. bfloat16 has no packed subtraction before sm_90, so 136 is subtracted by a multiply-add with 1.0.
_UNPACK = """{{
.reg .b32 a, b, c, d, w4, w8, w12;
shr.u32 w4, $4, 4;
shr.u32 w8, $4, 8;
shr.u32 w12, $4, 12;
lop3.b32 a, $4, 0x000F000F, {exponent}, 0xEA;
lop3.b32 b, w8, 0x000F000F, {exponent}, 0xEA;
lop3.b32 c, w4, 0x000F000F, {exponent}, 0xEA;
lop3.b32 d, w12, 0x000F000F, {exponent}, 0xEA;
{subtract}
}}"""


def _unpack(dtype: str, off: str) -> str:
    """The assembly, with a register or a constant that is added in bfloat16, and subtracted in float16."""
    if dtype == "bfloat16":
        exponent, template = "0x43004300", "fma.rn.bf16x2 {}, {}, one, off;"
        constants = f".reg .b32 one, off;\nmov.b32 one, 0x3F803F80;\nmov.b32 off, {off};\n"  # 1.0
    else:
        exponent, template = "0x64006400", "sub.f16x2 {}, {}, off;"
        constants = f".reg .b32 off;\nmov.b32 off, {off};\n"
    moves = "\n".join(template.format(f"${i}", name) for i, name in enumerate("abcd"))
    return _UNPACK.format(exponent=exponent, subtract=constants + moves)


# Minus 136, and 1032: the exponent's value and 8. Of a column's own zero points $5 and $6 hold what is added or subtracted, the same twice.
UNPACK_BF16 = tl.constexpr(_unpack("bfloat16", "0xC308C308"))
UNPACK_FP16 = tl.constexpr(_unpack("float16", "0x64086408"))
UNPACK_BF16_FROM = tl.constexpr(_unpack("bfloat16", "$5"))
UNPACK_FP16_FROM = tl.constexpr(_unpack("float16", "$5"))
FROM = tl.constexpr("=r,=r,=r,=r,r,r,r")


@triton.jit
def unpack(w, zeros, DTYPE: tl.constexpr, LOP3: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """[HALF, BLOCK_N] bytes to two tiles of the same shape: the first and the second half of a group of K, minus the zero points [BLOCK_N] uint8, or 8."""
    if LOP3 and DTYPE == tl.bfloat16:
        if zeros is None:
            low, high = tl.inline_asm_elementwise(
                UNPACK_BF16, "=r,=r,=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            off = (-128.0 - zeros.to(tl.float32)).to(tl.bfloat16)[None, :]
            low, high = tl.inline_asm_elementwise(
                UNPACK_BF16_FROM, FROM, [w, off], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
    elif LOP3:
        if zeros is None:
            low, high = tl.inline_asm_elementwise(
                UNPACK_FP16, "=r,=r,=r,=r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
        else:
            off = (1024.0 + zeros.to(tl.float32)).to(tl.float16)[None, :]
            low, high = tl.inline_asm_elementwise(
                UNPACK_FP16_FROM, FROM, [w, off], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
    else:
        zero = 8
        if zeros is not None:
            zero = zeros.to(tl.int8)[None, :]
        low = ((w & 15).to(tl.int8) - zero).to(DTYPE)
        high = ((w >> 4).to(tl.int8) - zero).to(DTYPE)
        # Of four neighbours, bytes 1 and 2 are exchanged.
        low = tl.reshape(
            tl.permute(tl.reshape(low, (HALF // 4, 2, 2, BLOCK_N)), (0, 2, 1, 3)), (HALF, BLOCK_N)
        )
        high = tl.reshape(
            tl.permute(tl.reshape(high, (HALF // 4, 2, 2, BLOCK_N)), (0, 2, 1, 3)), (HALF, BLOCK_N)
        )
    return low, high
