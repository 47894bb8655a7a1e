# SPDX-License-Identifier: Apache-2.0
"""One step of attention over a block of keys that are stored in 8 bits (`cache.py`, `attention.py`).

Codes are read two at a time, as words of 16 bits: tensor cores want pairs of neighbouring tokens, and shared memory is
transposed 16 bits at a time. The low codes of the words are the even features, the high ones the odd features; each half has
a product of its own. A code becomes the float16 that is 1 / 256 of it by moving its exponent and mantissa, which every GPU
can do. The factor of 256 is in the scales.

Queries are rounded to float16, relative to a power of two for each row, and so are weights times the scales of their values.
For these to be below 2, the largest z so far is the largest z + floor(log2(scale of the value)).
"""

from __future__ import annotations

import triton
import triton.language as tl
from nnfront_kernels.attention import limited
from nnfront_kernels.cache import step_rows

# Two words in, two float16 of even and two of odd features out. 0xEA is (a & b) | c.
MOVES = tl.constexpr("""{
.reg .b32 sign, size;
shl.b32 sign, $2, 8;
shl.b32 size, $2, 7;
and.b32 size, size, 0x3F803F80;
lop3.b32 $0, sign, 0x80008000, size, 0xEA;
shr.b32 size, $2, 1;
and.b32 size, size, 0x3F803F80;
lop3.b32 $1, $2, 0x80008000, size, 0xEA;
}""")


@triton.jit
def halves(words, PTX: tl.constexpr):
    """The even and the odd features of codes, as float16 and divided by 256. No code is NaN; what is not finite has such a scale."""
    if PTX:
        even, odd = tl.inline_asm_elementwise(
            MOVES, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even = (((words & 0x80) << 8) | ((words & 0x7F) << 7)).to(tl.float16, bitcast=True)
        odd = ((words & 0x8000) | ((words >> 1) & 0x3F80)).to(tl.float16, bitcast=True)
    return even, odd


@triton.jit
def narrowed(q, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of q as float16 below 2, even and odd features, and for each row 256 times what they were divided by."""
    wide = q.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), axis=1), 7.888609052210118e-31)  # 2^-100
    unit = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    narrow = (wide / unit[:, None]).to(tl.float16)
    even, odd = tl.split(tl.reshape(narrow, (BLOCK_M, BLOCK_D // 2, 2)))
    return even, odd, unit * 256.0


@triton.jit
def joined(acc_even, acc_odd, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The weighted values [BLOCK_M, BLOCK_D] in the order of their features."""
    return tl.reshape(tl.join(acc_even, acc_odd), (BLOCK_M, BLOCK_D)) * 256.0


@triton.jit
def attend_codes(
    q_even,  # [BLOCK_M, BLOCK_DK / 2] float16
    q_odd,
    acc_even,  # [BLOCK_M, BLOCK_DV / 2] float32
    acc_odd,
    largest,
    total,
    first,
    start,
    end,
    low,
    high,
    page,
    keys_ptr,  # uint16
    values_ptr,
    key_scales_ptr,  # of the first slot of the first page, for this head
    value_scales_ptr,
    stride_kp, stride_ks,
    stride_vp, stride_vs,
    stride_ksp,
    stride_vsp,
    scale,  # [BLOCK_M]: times log2(e) and what `narrowed` gave
    soft_cap,
    CAPPED: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    PTX: tl.constexpr,  # moves bits two words at a time
    bias_rows=None,
    inside=None,
):  # fmt: skip
    """`attention.attend_step`, whose arguments mean the same, but in halves."""
    WORDS_K: tl.constexpr = SIZE_K // 2
    WORDS_V: tl.constexpr = SIZE_V // 2
    at = first + tl.arange(0, BLOCK_N)
    held = (at >= start) & (at < end)
    dk, dv = tl.arange(0, BLOCK_DK // 2)[None, :], tl.arange(0, BLOCK_DV // 2)[None, :]
    k_ptrs = step_rows(keys_ptr, page, first, stride_kp, stride_ks, PAGE, BLOCK_N)[:, None] + dk
    v_ptrs = step_rows(values_ptr, page, first, stride_vp, stride_vs, PAGE, BLOCK_N)[:, None] + dv
    k_scales_ptrs = step_rows(key_scales_ptr, page, first, stride_ksp, 1, PAGE, BLOCK_N)
    v_scales_ptrs = step_rows(value_scales_ptr, page, first, stride_vsp, 1, PAGE, BLOCK_N)
    if MASKED:
        k = tl.load(k_ptrs, mask=held[:, None] & (dk < WORDS_K), other=0)
        v = tl.load(v_ptrs, mask=held[:, None] & (dv < WORDS_V), other=0)
        k_scales = tl.load(k_scales_ptrs, mask=held, other=1.0)
        v_scales = tl.load(v_scales_ptrs, mask=held, other=1.0)
    else:
        k = tl.load(k_ptrs) if 2 * WORDS_K == BLOCK_DK else tl.load(k_ptrs, mask=dk < WORDS_K, other=0)
        v = tl.load(v_ptrs) if 2 * WORDS_V == BLOCK_DV else tl.load(v_ptrs, mask=dv < WORDS_V, other=0)
        k_scales, v_scales = tl.load(k_scales_ptrs), tl.load(v_scales_ptrs)
    k_even, k_odd = halves(k, PTX)
    v_even, v_odd = halves(v, PTX)
    z = tl.dot(q_odd, k_odd.T, tl.dot(q_even, k_even.T)) * (scale[:, None] * k_scales[None, :])
    z = limited(z, at, low, high, soft_cap, CAPPED, MASKED, bias_rows, inside, held[:, None])
    exponent = ((v_scales.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)
    new = tl.maximum(largest, tl.max(z + exponent[None, :], axis=1))
    finite = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(z - finite[:, None])
    shrink = tl.exp2(largest - finite)
    total = total * shrink + tl.sum(weights, axis=1)
    scaled = (weights * v_scales[None, :]).to(tl.float16)
    acc_even = tl.dot(scaled, v_even, acc_even * shrink[:, None])
    acc_odd = tl.dot(scaled, v_odd, acc_odd * shrink[:, None])
    return acc_even, acc_odd, new, total
