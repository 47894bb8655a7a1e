// SPDX-License-Identifier: Apache-2.0
// Float8 (e4m3fn): four bits of exponent, three of mantissa, no infinity.

#ifndef NNFRONT_FLOAT8_H
#define NNFRONT_FLOAT8_H

#include <math.h>

#include "words.h"

// What quantised values of float8 (e4m3fn) stand for: those of exponent 0 are multiples of 2^-9, the last one is NaN.
FAST INLINE Floats decoded(Bits quantized) {
    const Bits size = quantized & 0x7F, normal = (size << 20) + (120 << 23), is_small = (Bits)(size < 8), is_nan = (Bits)(size == 0x7F);
    const Floats small = __builtin_convertvector((Ints)size, Floats) * 0x1p-9f;
    return (Floats)(((Bits)small & is_small) | (normal & ~(is_small | is_nan)) | (is_nan & 0x7FC00000) | ((quantized & 0x80) << 24));
}

// The same of the quantised values at `from`, or of the first of them that `there` marks.
FAST INLINE Floats decoded_there(const uint8_t *from, Lanes there) {
#if AVX512
    // As float16, whose exponent has a bit more, their bits are 2^-8 times as much. Vectors of bytes are short, and so cost less than those of words.
    const __m128i quantized = _mm_maskz_loadu_epi8(there, from), last = _mm_set1_epi8(0x7F);
    const __mmask16 is_nan = _mm_cmpeq_epi8_mask(_mm_and_si128(quantized, last), last);
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(quantized), 7), _mm256_set1_epi16((short)0xBF80));
    return _mm512_mask_mov_ps((__m512)(_mm512_cvtph_ps(halves) * all(0x1p8f)), is_nan, all(NAN));
#else
    return decoded(bytes_there(from, there));
#endif
}

// The quantised value of float8 that is nearest to a number of at most 448, to an even one of two.
INLINE uint8_t coded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    float size = fabsf(value);
    if (value != value) return sign | 0x7F;
    if (size < 0x1p-6f) {
        size += 0x1p14f;  // whose last bit is 2^-9
        memcpy(&bits, &size, sizeof bits);
        return sign | (uint8_t)(bits & 0xF);
    }
    memcpy(&bits, &size, sizeof bits);
    return sign | (uint8_t)(((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

#endif
