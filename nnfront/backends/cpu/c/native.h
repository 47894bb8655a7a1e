// SPDX-License-Identifier: Apache-2.0
// What the kernels in C share: how they are called, the threads that they run on, bfloat16.
//
// They are for processors that multiply bfloat16 in pairs (AVX512_BF16: Zen 4, Cooper Lake and later), and are left out elsewhere.

#ifndef NNFRONT_NATIVE_H
#define NNFRONT_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_KERNELS 1
#include <immintrin.h>
#else
#define HAS_KERNELS 0
#endif

#define FAST __attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 32 };  // bfloat16 values in a vector
enum { MOST_TOKENS = 64 };  // that a product of few rows has

// Work on the parts `first` to `end` of what `work` describes.
typedef void (*Share)(const void *work, Py_ssize_t first, Py_ssize_t end);

// Let threads work on `count` parts. Each takes a share of what is left whenever it is done, in multiples of `least`: long streams are what memory
// likes, and the short ones at the end let threads stop together, though they do not all get the same from memory. Without the GIL.
void in_shares(Share share, const void *work, Py_ssize_t count, Py_ssize_t least, unsigned threads);

// What each kernel takes, and its function, which returns NULL, or why it did nothing. Its operands are as large as the table says. Without the GIL.
#define KERNEL(name, arguments) \
    struct name { \
        arguments \
    }; \
    const char *name(const struct name *n);
#define SIZE(name) Py_ssize_t name;
#define REAL(name) double name;
#define IN(name, bytes) const void *name;
#define OUT(name, bytes) void *name;
#include "kernels.def"

// Why a kernel does nothing, until the next call of the same thread.
const char *refused(const char *format, ...);

extern const char no_memory[];

#if HAS_KERNELS

INLINE float widened(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// To the nearest, ties to even; a NaN stays one.
INLINE uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// The same of a vector.
FAST INLINE __m256i rounded_vector(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values), high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(near, is_nan, high, _mm512_set1_epi32(0x40)));
}

// The first `count` lanes of a vector of floats, all of them where there are more.
FAST INLINE __mmask16 first_lanes(Py_ssize_t count) { return count < 16 ? (__mmask16)((1 << count) - 1) : (__mmask16)-1; }

// 16 values, zero where `there` marks none.
FAST INLINE __m512 widened_vector(const uint16_t *from, __mmask16 there) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from)), 16));
}

// e^x for x <= 0 as 2^n e^r with |r| <= ln 2 / 2, and e^r by its series. A NaN stays one.
FAST INLINE __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);  // e^-150 is 0 in float32
    const float series[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    // ln 2 in two parts, the first of which has so few bits that n times it is exact.
    const __m512 near = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), near);
    __m512 sum = _mm512_set1_ps(1.0f / 720);
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++) sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(series[i]));
    return _mm512_scalef_ps(sum, n);
}

#endif
#endif
