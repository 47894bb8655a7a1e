// SPDX-License-Identifier: Apache-2.0
// The words that kernels are written in: vectors of floats and of bfloat16, in the registers of the instruction set that this is compiled for.
//
// A file for each set (`set_*.c`) says how long a vector is and which functions need which instructions (FAST), and includes the kernels. All sets share
// what compilers know of vectors: operators, conversions, and that a product and a sum become one instruction where there is one. What has an
// instruction of its own has a section here.

#ifndef NNFRONT_WORDS_H
#define NNFRONT_WORDS_H

#include "native.h"

#if AVX512 || AVX2
#include <immintrin.h>
#elif NEON
#include <arm_neon.h>
#endif

enum { FLOATS = VECTOR / 4, LANES = VECTOR / 2 };  // floats and bfloat16 values in a vector

// Bytes ahead of their use for which memory is asked: the streams that processors see by themselves end with each page, and are too short for two cores to
// take all that memory gives.
enum { AHEAD = 1 << 10 };

enum { LINE = 64 };  // bytes that come from memory together

// Whether an instruction multiplies bfloat16 in pairs.
#if AVX512_BF16 || NEON_BF16
#define PAIRS 1
#else
#define PAIRS 0
#endif

// What a row is multiplied by: two of them are one lane where bfloat16 is multiplied in pairs.
#if PAIRS
typedef uint16_t Factor;
#else
typedef float Factor;
#endif

// Whether an instruction multiplies bytes by fours, or if none does in pairs.
#ifndef BYTES_BY_FOURS
#define BYTES_BY_FOURS 0
#endif
#if (AVX512 || AVX2) && !BYTES_BY_FOURS
#define BYTES_BY_PAIRS 1
#else
#define BYTES_BY_PAIRS 0
#endif

// How many places of a weight one row meets in turn, 1 or 4, far from one another, and several rows as many or half: what some processors fetch ahead of each place is little. Measured on Zen 3 and Zen 4; others may gain as well.
#ifndef STREAMS
#if AVX512 || BYTES_BY_PAIRS
#define STREAMS 4
#else
#define STREAMS 1
#endif
#endif
enum { AHEAD_OF_STREAM = 384 };  // bytes that are fetched before they are needed

#pragma GCC diagnostic ignored "-Wpsabi"  // all that takes or returns a vector is inlined

#define OF(bytes) __attribute__((vector_size(bytes)))
typedef float Floats OF(VECTOR);
typedef int32_t Ints OF(VECTOR);
typedef uint32_t Bits OF(VECTOR);
typedef uint16_t Words OF(VECTOR);  // bfloat16
typedef uint16_t Narrow OF(VECTOR / 2);
typedef uint8_t Bytes OF(VECTOR / 4);
typedef float Four OF(16);

FAST INLINE Floats all(float value) { return value - (Floats){0}; }  // a sum with zero would be one: it is not -0 where that is

FAST INLINE Floats floats(const void *from) {
    Floats values;
    memcpy(&values, from, sizeof values);
    return values;
}

FAST INLINE void store(float *to, Floats values) { memcpy(to, &values, sizeof values); }

FAST INLINE Words words(const uint16_t *from) {
    Words values;
    memcpy(&values, from, sizeof values);
    return values;
}

// Floats in a register of their own, where compilers would load them wherever they are multiplied.
FAST INLINE Floats loaded(const float *from) {
    Floats values = floats(from);
#if AVX512
    __asm__("" : "+v"(values));
#elif AVX2
    __asm__("" : "+x"(values));
#elif NEON
    __asm__("" : "+w"(values));
#endif
    return values;
}

// Have what lies there come nearer; it may be no memory at all.
INLINE void fetch(const void *there) { __builtin_prefetch(there, 0, 3); }

FAST INLINE Floats absolute(Floats x) { return (Floats)((Bits)x & 0x7FFFFFFF); }

// -|x|
FAST INLINE Floats negative(Floats x) { return (Floats)((Bits)x | 0x80000000); }

// The size of x, which is not negative, with the sign of y.
FAST INLINE Floats with_sign(Floats x, Floats y) { return (Floats)((Bits)x | ((Bits)y & 0x80000000)); }

// To the nearest bfloat16, ties to even. In the low half of each lane.
FAST INLINE Bits rounded_bits(Floats values) {
    const Bits bits = (Bits)values, high = bits >> 16;
    return (bits + ((high & 1) + 0x7FFF)) >> 16;
}

// The same; a NaN stays one.
FAST INLINE Bits nearest_bits(Floats values) {
    const Bits is_nan = (Bits)(values != values), quiet = (Bits)values >> 16 | 0x40;
    return (rounded_bits(values) & ~is_nan) | (quiet & is_nan);
}

#if AVX512

typedef __mmask16 Lanes;  // some of the lanes of a vector of floats

// The first `count` lanes, all of them where there are more.
FAST INLINE Lanes first_lanes(Py_ssize_t count) { return count < FLOATS ? (__mmask16)((1 << count) - 1) : (__mmask16)-1; }

// The floats at `from`, zero where `there` marks none.
FAST INLINE Floats floats_there(const void *from, Lanes there) { return _mm512_maskz_loadu_ps(there, from); }

FAST INLINE Floats only(Lanes there, Floats values) { return _mm512_maskz_mov_ps(there, values); }

FAST INLINE void store_there(float *to, Lanes there, Floats values) { _mm512_mask_storeu_ps(to, there, values); }

FAST INLINE Words first_words(const uint16_t *from, Py_ssize_t count) {
    return (Words)_mm512_maskz_loadu_epi16(((__mmask32)1 << count) - 1, from);
}

// FLOATS bytes, zero where `there` marks none.
FAST INLINE Bits bytes_there(const uint8_t *from, Lanes there) { return (Bits)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, from)); }

// Values in bfloat16, zero where `there` marks none.
FAST INLINE Floats widened_vector(const uint16_t *from, Lanes there) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from)), 16));
}

FAST INLINE void store_rounded(uint16_t *to, Lanes there, Floats values) {
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32((__m512i)values, 16), _mm512_set1_epi32(0x40));
    const __m512i bits = _mm512_mask_mov_epi32((__m512i)rounded_bits(values), is_nan, quiet);
    _mm256_mask_storeu_epi16(to, there, _mm512_cvtepi32_epi16(bits));
}

FAST INLINE float total(Floats values) { return _mm512_reduce_add_ps(values); }

FAST INLINE float greatest_of(Floats values) { return _mm512_reduce_max_ps(values); }

// The greater one; y if one of them is NaN.
FAST INLINE Floats greater(Floats x, Floats y) { return _mm512_max_ps(x, y); }

// `then` where x < y, else `otherwise`.
FAST INLINE Floats where_less(Floats x, Floats y, Floats then, Floats otherwise) {
    return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), then);
}

FAST INLINE Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }

// x * 2^n
FAST INLINE Floats times_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }

// The same for 2^n that are no denormal numbers.
FAST INLINE Floats times_normal_power(Floats x, Floats n) { return times_power(x, n); }

#else

typedef Py_ssize_t Lanes;  // as many of the first lanes

FAST INLINE Lanes first_lanes(Py_ssize_t count) { return count < FLOATS ? count : FLOATS; }

FAST INLINE Floats floats_there(const void *from, Lanes there) {
    if (there == FLOATS) return floats(from);
    float values[FLOATS] = {0};
    memcpy(values, from, (size_t)there * sizeof *values);
    return floats(values);
}

FAST INLINE Floats only(Lanes there, Floats values) {
    Ints lanes;
    for (int i = 0; i < FLOATS; i++) lanes[i] = i;
    return (Floats)((Ints)values & (lanes < (int32_t)there));
}

FAST INLINE void store_there(float *to, Lanes there, Floats values) { memcpy(to, &values, (size_t)there * sizeof *to); }

FAST INLINE Words first_words(const uint16_t *from, Py_ssize_t count) {
    uint16_t values[LANES] = {0};
    memcpy(values, from, (size_t)count * sizeof *values);
    return words(values);
}

FAST INLINE Bits bytes_there(const uint8_t *from, Lanes there) {
    Bytes values = {0};
    if (there == FLOATS)
        memcpy(&values, from, sizeof values);
    else
        memcpy(&values, from, (size_t)there);
#if AVX2
    uint64_t eight;
    memcpy(&eight, &values, sizeof eight);
    return (Bits)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)eight));
#else
    return __builtin_convertvector(values, Bits);
#endif
}

FAST INLINE Floats widened_vector(const uint16_t *from, Lanes there) {
#if AVX2
    if (there == FLOATS) return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#endif
    Narrow values = {0};
    if (there == FLOATS)
        memcpy(&values, from, sizeof values);
    else
        memcpy(&values, from, (size_t)there * sizeof *from);
    return (Floats)(__builtin_convertvector(values, Bits) << 16);
}

FAST INLINE void store_rounded(uint16_t *to, Lanes there, Floats values) {
    const Narrow narrow = __builtin_convertvector(nearest_bits(values), Narrow);
    if (there == FLOATS)
        memcpy(to, &narrow, sizeof narrow);
    else
        memcpy(to, &narrow, (size_t)there * sizeof *to);
}

FAST INLINE float total(Floats values) {
    Four parts[FLOATS / 4];
    memcpy(parts, &values, sizeof values);
    for (int i = 1; i < FLOATS / 4; i++) parts[0] += parts[i];
    return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

FAST INLINE Floats where_less(Floats x, Floats y, Floats then, Floats otherwise) {
#if AVX2
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
#else
    const Bits is_less = (Bits)(x < y);
    return (Floats)(((Bits)then & is_less) | ((Bits)otherwise & ~is_less));
#endif
}

FAST INLINE Floats greater(Floats x, Floats y) {
#if AVX2
    return _mm256_max_ps(x, y);
#else
    return where_less(y, x, x, y);
#endif
}

FAST INLINE float greatest_of(Floats values) {
    float most = values[0];
    for (int i = 1; i < FLOATS; i++) most = values[i] > most ? values[i] : most;
    return most;
}

FAST INLINE Floats nearest(Floats x) { return (x + 0x1.8p23f) - 0x1.8p23f; }  // where floats are integers; |x| < 2^22

FAST INLINE Floats times_power(Floats x, Floats n) {
    const Ints whole = __builtin_convertvector(n, Ints), first = whole >> 1;  // two factors, as one may be too small for a float
    return x * (Floats)((first + 127) << 23) * (Floats)((whole - first + 127) << 23);
}

FAST INLINE Floats times_normal_power(Floats x, Floats n) { return x * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23); }

#endif

// The totals of `count` vectors, a constant, where there is room for a multiple of 16; each is a sum in the order of `total`.
FAST INLINE void store_totals(float *to, const Floats *of, const int count) {
#if AVX512
#define HALVES(x, y, low, high) _mm512_add_ps(_mm512_shuffle_f32x4(x, y, low), _mm512_shuffle_f32x4(x, y, high))
#pragma GCC unroll 4
    for (int first = 0; first < count; first += 16) {
        __m512 halves[8], quarters[4], pairs[2];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            // Every fourth vector after the other, as the last two steps bring them into their order.
            const int x = first + i % 2 * 8 + i / 2, y = x + 4;
            halves[i] = HALVES(x < count ? of[x] : all(0.0f), y < count ? of[y] : all(0.0f), 0x44, 0xEE);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) quarters[i] = HALVES(halves[2 * i], halves[2 * i + 1], 0x88, 0xDD);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const __m512d x = (__m512d)quarters[2 * i], y = (__m512d)quarters[2 * i + 1];
            pairs[i] = (__m512)_mm512_unpacklo_pd(x, y) + (__m512)_mm512_unpackhi_pd(x, y);
        }
        store(to + first, (Floats)(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88) + _mm512_shuffle_ps(pairs[0], pairs[1], 0xDD)));
    }
#undef HALVES
#elif AVX2
#define PAIRS_OF(x, y) ((Floats)_mm256_shuffle_ps(x, y, 0x88) + (Floats)_mm256_shuffle_ps(x, y, 0xDD))
#pragma GCC unroll 4
    for (int first = 0; first < count; first += FLOATS) {
        Floats halves[4];  // each of a vector and of the fourth after it
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const Floats x = first + i < count ? of[first + i] : all(0.0f), y = first + i + 4 < count ? of[first + i + 4] : all(0.0f);
            halves[i] = (Floats)_mm256_permute2f128_ps(x, y, 0x20) + (Floats)_mm256_permute2f128_ps(x, y, 0x31);
        }
        store(to + first, PAIRS_OF(PAIRS_OF(halves[0], halves[1]), PAIRS_OF(halves[2], halves[3])));
    }
#undef PAIRS_OF
#else
    for (int i = 0; i < count; i++) to[i] = total(of[i]);
#endif
}

// x * y + z, rounded once where there is an instruction for it.
FAST INLINE Floats fused(Floats x, Floats y, Floats z) {
#if AVX512
    return _mm512_fmadd_ps(x, y, z);
#elif AVX2
    return _mm256_fmadd_ps(x, y, z);
#elif NEON
    return (Floats)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
    return x * y + z;
#endif
}

// Add x * y to a sum where it is: compilers copy some sums first.
FAST INLINE void add_product(Floats *sum, Floats x, Floats y) {
#if AVX2
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(x), "x"(y));
#else
    *sum = fused(x, y, *sum);
#endif
}

// Elements from `at` on, which are float if `is_wide` and else bfloat16, zero where `there` marks none.
FAST INLINE Floats elements(const void *from, bool is_wide, Py_ssize_t at, Lanes there) {
    return is_wide ? floats_there((const float *)from + at, there) : widened_vector((const uint16_t *)from + at, there);
}

FAST INLINE void store_elements(void *to, bool is_wide, Py_ssize_t at, Lanes there, Floats values) {
    if (is_wide)
        store_there((float *)to + at, there, values);
    else
        store_rounded((uint16_t *)to + at, there, values);
}

// The sum of all lanes.
FAST INLINE int32_t in_total(Ints sums) {
#if AVX512
    return _mm512_reduce_add_epi32((__m512i)sums);
#else
    int32_t total = 0;
    for (int i = 0; i < FLOATS; i++) total += sums[i];
    return total;
#endif
}

// What LANES products of bfloat16 add to a sum, in pairs.
FAST INLINE Floats dot(Floats sum, Words x, Words y) {
#if AVX512_BF16
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
#elif NEON_BF16
    return vbfdotq_f32(sum, (bfloat16x8_t)x, (bfloat16x8_t)y);
#else
    sum = fused((Floats)((Bits)x << 16), (Floats)((Bits)y << 16), sum);
    return fused((Floats)((Bits)x & 0xFFFF0000), (Floats)((Bits)y & 0xFFFF0000), sum);
#endif
}

#if BYTES_BY_FOURS
// What four products of bytes add to each sum; those of the weight have no sign on x86.
FAST INLINE Ints plus_fours(Ints sum, Bits weight, Bits x) {
#if AVX512
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, (__m512i)x);
#elif NEON
    return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)weight, (int8x16_t)x);
#else
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weight, (__m256i)x);
#endif
}
#endif

#if AVX512 || AVX2
// Sums of two products of bytes, in 16 bits; those of the weight have no sign.
FAST INLINE Words pairs_of_bytes(Bits weight, Bits x) {
#if AVX512
    return (Words)_mm512_maddubs_epi16((__m512i)weight, (__m512i)x);
#else
    return (Words)_mm256_maddubs_epi16((__m256i)weight, (__m256i)x);
#endif
}

// What two products of neighbours of 16 bits add to each sum.
FAST INLINE Ints plus_neighbours(Ints sum, Words x, Words y) {
#if AVX512 && BYTES_BY_FOURS
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)y);
#elif AVX512
    return sum + (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#elif BYTES_BY_FOURS
    return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)y);
#else
    return sum + (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#endif
}
#endif

#if BYTES_BY_PAIRS
// What two products of bytes add to each sum of 16 bits; those of the weight are from 0 to 15, so that eight times as much is exact.
FAST INLINE Words plus_pairs(Words sum, Bits weight, Bits x) { return sum + pairs_of_bytes(weight, x); }

// A number of 16 bits in all lanes, which compilers do not know: they would make it anew where it is used.
FAST INLINE Words in_all(uint16_t number) {
    Words numbers = number - (Words){0};
    __asm__("" : "+x"(numbers));
    return numbers;
}

// What four products of bytes add to each sum, both with signs: x, which is not -128, takes the sign of the weight, so that two products of at most 128 times 127 are exact in 16 bits.
FAST INLINE Ints plus_fours(Ints sum, Bits weight, Bits x) {
#if AVX512
    const __m512i size = _mm512_abs_epi8((__m512i)weight), of_x = _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)weight), _mm512_setzero_si512(), (__m512i)x);
#else
    const __m256i size = _mm256_abs_epi8((__m256i)weight), of_x = _mm256_sign_epi8((__m256i)x, (__m256i)weight);
#endif
    return plus_neighbours(sum, pairs_of_bytes((Bits)size, (Bits)of_x), in_all(1));
}
#endif

#if !BYTES_BY_FOURS && !BYTES_BY_PAIRS
// What four products of bytes add to each sum; those of the weight have no sign.
FAST INLINE Ints plus_fours(Ints sum, Bits weight, Bits x) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sum += (Ints)(weight >> 8 * i & 255) * ((Ints)(x << (24 - 8 * i)) >> 24);
    return sum;
}
#endif

// What numbers times scales add to each sum: on x86 both are two words of 16 bits in a lane, which are multiplied with each other.
#if AVX512 || AVX2
FAST INLINE Ints plus_scaled(Ints sum, Bits scales, Bits of) { return plus_neighbours(sum, (Words)scales, (Words)of); }
#else
FAST INLINE Ints plus_scaled(Ints sum, Bits scales, Bits of) { return sum + (Ints)scales * (Ints)of; }
#endif

// VECTOR bytes, zero behind the first `count`.
FAST INLINE Bits some_bytes(const uint8_t *from, Py_ssize_t count) {
#if AVX512
    return (Bits)_mm512_maskz_loadu_epi8(count < VECTOR ? ((__mmask64)1 << count) - 1 : (__mmask64)-1, from);
#else
    Bits bytes = {0};
    if (count >= VECTOR)
        memcpy(&bytes, from, VECTOR);
    else
        memcpy(&bytes, from, (size_t)count);
    return bytes;
#endif
}

// Of each 16 bytes the first two, or the last two, pairs of two vectors in turn; `halves` of twice as long.
#if AVX512
#define IN_TURN(name, type, bits) \
    FAST INLINE Bits name(Bits x, Bits y) { return (Bits)_mm512_unpack##type##_epi##bits((__m512i)x, (__m512i)y); }
#elif AVX2
#define IN_TURN(name, type, bits) \
    FAST INLINE Bits name(Bits x, Bits y) { return (Bits)_mm256_unpack##type##_epi##bits((__m256i)x, (__m256i)y); }
#endif
#if AVX512 || AVX2
IN_TURN(first_pairs, lo, 32) IN_TURN(last_pairs, hi, 32) IN_TURN(first_halves, lo, 64) IN_TURN(last_halves, hi, 64)
#undef IN_TURN
#else
FAST INLINE Bits first_pairs(Bits x, Bits y) { return (Bits){x[0], y[0], x[1], y[1]}; }
FAST INLINE Bits last_pairs(Bits x, Bits y) { return (Bits){x[2], y[2], x[3], y[3]}; }
FAST INLINE Bits first_halves(Bits x, Bits y) { return (Bits){x[0], x[1], y[0], y[1]}; }
FAST INLINE Bits last_halves(Bits x, Bits y) { return (Bits){x[2], x[3], y[2], y[3]}; }
#endif

// Swap rows and columns of FLOATS times FLOATS.
FAST INLINE void transpose(Bits *rows) {
    Bits some[FLOATS];
#pragma GCC unroll 4
    for (int i = 0; i < FLOATS; i += 4) {  // within 16 bytes
        const Bits a = first_pairs(rows[i], rows[i + 1]), b = last_pairs(rows[i], rows[i + 1]);
        const Bits c = first_pairs(rows[i + 2], rows[i + 3]), d = last_pairs(rows[i + 2], rows[i + 3]);
        some[i] = first_halves(a, c), some[i + 1] = last_halves(a, c), some[i + 2] = first_halves(b, d), some[i + 3] = last_halves(b, d);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
#if AVX512
        const __m512i even = _mm512_shuffle_i32x4((__m512i)some[j], (__m512i)some[4 + j], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4((__m512i)some[j], (__m512i)some[4 + j], 0xDD);
        const __m512i more_even = _mm512_shuffle_i32x4((__m512i)some[8 + j], (__m512i)some[12 + j], 0x88);
        const __m512i more_odd = _mm512_shuffle_i32x4((__m512i)some[8 + j], (__m512i)some[12 + j], 0xDD);
        rows[j] = (Bits)_mm512_shuffle_i32x4(even, more_even, 0x88), rows[8 + j] = (Bits)_mm512_shuffle_i32x4(even, more_even, 0xDD);
        rows[4 + j] = (Bits)_mm512_shuffle_i32x4(odd, more_odd, 0x88), rows[12 + j] = (Bits)_mm512_shuffle_i32x4(odd, more_odd, 0xDD);
#elif AVX2
        rows[j] = (Bits)_mm256_permute2x128_si256((__m256i)some[j], (__m256i)some[4 + j], 0x20);
        rows[4 + j] = (Bits)_mm256_permute2x128_si256((__m256i)some[j], (__m256i)some[4 + j], 0x31);
#else
        rows[j] = some[j];
#endif
    }
}

// FLOATS signed bytes.
FAST INLINE Ints signed_bytes(const uint8_t *from) {
#if AVX512
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif AVX2
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#elif NEON
    int32_t four;
    memcpy(&four, from, sizeof four);
    return (Ints)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
#else
    Ints values;
    for (int i = 0; i < FLOATS; i++) values[i] = (int8_t)from[i];
    return values;
#endif
}

// e^x for x <= 0 as 2^n e^r with |r| <= ln 2 / 2: e^r by its series. A NaN stays one.
FAST INLINE Floats exponential_of_rest(Floats x, Floats *n) {
    const float series[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    *n = nearest(x * 1.44269504f);
    // ln 2 in two parts, the first of which has so few bits that n times it is exact.
    const Floats r = fused(*n, all(2.12194440e-4f), fused(*n, all(-0.693359375f), x));
    Floats sum = all(1.0f / 720);
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++) sum = fused(sum, r, all(series[i]));
    return sum;
}

// e^x for x <= 0
FAST INLINE Floats exponential(Floats x) {
    Floats n;
    const Floats rest = exponential_of_rest(greater(all(-150.0f), x), &n);  // e^-150 is 0 in float32
    return times_power(rest, n);
}

#endif
