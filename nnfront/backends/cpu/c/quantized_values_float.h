// SPDX-License-Identifier: Apache-2.0
// Quantised values as floats, for processors that do not multiply bfloat16.
//
// Integers of four bits are multiplied as such where bytes are multiplied in pairs (`quantized_values_integers.h`). Others are left where they lie in their words: a mask and a conversion make 2^(4k) times the quantised value of them, x has been divided by as much, and the
// zero point is taken from sums of x. That is three instructions for eight quantised values of AVX2, as many as there is time for. Values of a table, 128 more than
// they are so that none is negative, are multiplied in the same way where they lie, a byte each.

#ifndef NNFRONT_QUANTIZED_VALUES_FLOAT_H
#define NNFRONT_QUANTIZED_VALUES_FLOAT_H

#include <math.h>

#include "quantized_values.h"

enum {
    IN_WORD = 8,          // of four bits in a word, and vectors that they become
    INTEGER_VECTORS = 6,  // of a step of x where values are multiplied as integers
};

// Whether they are (`quantized_values_integers.h`).
INLINE bool in_integers(const Stored how) { return BYTES_BY_PAIRS && (how == INT4_GROUPS || how == UINT4_GROUPS); }

// Whether what they are multiplied as more than they stand for is taken from the sums of each step.
INLINE bool is_taken_from_steps(const Stored how) { return BYTES_BY_PAIRS && how == INT4_GROUPS; }

// A vector of words of 4 bits; 32 bytes of 8 bits, so that they are of one group.
INLINE int step_bytes(const Stored how) { return how >= INT4_GROUPS ? VECTOR : 32; }

INLINE int parts_of(const Stored how) { return how >= INT4_GROUPS ? IN_WORD : 32 / FLOATS; }

INLINE int step_elements(const Stored how) { return (in_integers(how) ? (int)INTEGER_VECTORS : parts_of(how)) * FLOATS; }

// Whether quantised values are multiplied as more than they stand for before their zero points are taken from them, and by how much less.
INLINE bool has_offset(const Stored how) { return how >= INT4_GROUPS; }
INLINE float offset_of(const Quantized *p, const Stored how) { return how == UINT4_GROUPS ? 0.0f : how == INT4_GROUPS ? -8.0f : -128.0f * p->unit; }

// What is the same for all quantised values of a call.
typedef struct {
    Bits masks[IN_WORD - 1], eights, values;
    Bits bytes;   // of scales in bfloat16, those of each lane's own as a float
    Ints places;  // for each lane which of the groups whose quantised values are in a step of 4 bits is its own
} Constants;

FAST INLINE Constants constants(const Quantized *p, const Stored how) {
    Constants c = {0};
    for (int k = 0; k < IN_WORD - 1; k++) c.masks[k] += 15u << 4 * k;
    c.eights += 0x88888888;
    for (int i = 0; i < VECTOR && how == VALUES4; i++) ((uint8_t *)&c.values)[i] = (uint8_t)(p->values[i % 16] + 128);
    for (int lane = 0; lane < FLOATS && is_grouped(how); lane++) c.places[lane] = how < INT4_GROUPS ? 0 : IN_WORD * lane >> p->shift;
    for (int lane = 0; lane < FLOATS && in_integers(how); lane++) c.bytes[lane] = 0x01008080u + 0x02020000u * (uint32_t)c.places[lane];
#if AVX512 || AVX2
    // Not known to compilers, which would make them anew in each step.
    for (int k = 0; k < IN_WORD - 1; k++) __asm__("" : "+x"(c.masks[k]));
    __asm__("" : "+x"(c.eights));
#endif
    return c;
}

// Of the floats at `from` each lane's own.
FAST INLINE Floats spread(const float *from, Ints places) {
#if AVX512
    return _mm512_permutexvar_ps((__m512i)places, floats(from));
#elif AVX2
    return _mm256_permutevar8x32_ps(floats(from), (__m256i)places);
#else
    if (!places[FLOATS - 1]) return all(from[0]);  // a step is seldom longer than a group
    Floats each;
    for (int lane = 0; lane < FLOATS; lane++) each[lane] = from[places[lane]];
    return each;
#endif
}

#include "quantized_values_integers.h"

// Bring a row of x into the order of the quantised values; what is added at its end is zero.
FAST static void arrange(const uint16_t *from, float *to, Py_ssize_t columns, Py_ssize_t steps, const Stored how) {
    if (in_integers(how)) {
        arrange_integers(from, to, columns, steps);
        return;
    }
    memset(to, 0, (size_t)(steps * step_elements(how)) * sizeof *to);
    for (Py_ssize_t at = 0; at < columns; at++) {
        const float value = widened(from[at]);
        if (how < INT4_GROUPS) {
            to[at] = is_float8(how) ? value * 0x1p8f : value;
            continue;
        }
        const Py_ssize_t within = at % (IN_WORD * FLOATS), number = within % IN_WORD;
        float *step = to + at / (IN_WORD * FLOATS) * step_elements(how) + within / IN_WORD;
        const int shift = number == IN_WORD - 1 ? 0 : how != VALUES4 ? 4 * number : number / 2 == 3 ? 0 : number / 2 * 8;
        step[number * FLOATS] = value / (float)(1 << shift);
    }
}

// 2^-8 times what FLOATS quantised values of e4m3fn stand for, which is what their bits are in float16, whose exponent has a bit more.
FAST INLINE Floats float8(const uint8_t *quantized) {
#if AVX512
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)quantized)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16((short)0xBF80)));
#elif AVX2
    const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)quantized)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16((short)0xBF80)));
#else
    return (Floats)((Bits)signed_bytes(quantized) << 20 & 0x87F00000) * 0x1p112f;
#endif
}

// In each byte what its low half finds in a table of 16 bytes; the high one is zero.
FAST INLINE Bits found_in(Bits table, Bits places) {
#if AVX512
    return (Bits)_mm512_shuffle_epi8((__m512i)table, (__m512i)places);
#elif AVX2
    return (Bits)_mm256_shuffle_epi8((__m256i)table, (__m256i)places);
#elif NEON
    return (Bits)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)places);
#else
    Bits found;
    for (int i = 0; i < VECTOR; i++) ((uint8_t *)&found)[i] = ((const uint8_t *)&table)[((const uint8_t *)&places)[i]];
    return found;
#endif
}

// The quantised values number `k` of a step as floats.
FAST INLINE Floats decode(const Constants *c, const Stored how, const uint8_t *quantized, const int k) {
    if (is_float8(how)) return float8(quantized + k * FLOATS);
    if (how < INT4_GROUPS) return __builtin_convertvector(signed_bytes(quantized + k * FLOATS), Floats);
    Bits words;
    memcpy(&words, quantized, sizeof words);
    if (how == VALUES4) {
        const Bits bytes = found_in(c->values, (k % 2 ? words >> 4 : words) & 0x0F0F0F0F);
        return __builtin_convertvector((Ints)(k / 2 == 3 ? bytes >> 24 : bytes & 255u << k / 2 * 8), Floats);
    }
    if (how == INT4_GROUPS) words ^= c->eights;  // from -8 on become from 0 on
    return __builtin_convertvector((Ints)(k < IN_WORD - 1 ? words & c->masks[k] : words >> 28), Floats);
}

// Groups whose x is near, those that the end of a step shares with others, and what is read beyond.
enum { MOST_GROUPS = NEAR_ARRANGED / sizeof(float) / 16 + 4 + FLOATS };

// Whether products are added to sums as they come, and not first to those of a step, which wait for one another less: never.
INLINE bool adds_at_once(const Stored how) { return false; }

// Outputs come one after the other: `each` is 1.
INLINE int outputs_in_turn(const Stored how, const int rows) { return 1; }

// Add to `sums` what the quantised values of the steps `first` to `end` of output `at` and the first rows of x contribute; of no rows write there what these are multiplied with, decoded.
FAST INLINE void add_steps(const Quantized *p, const Constants *c, const Stored how, Floats *sums, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end,
                           const int rows, const int each) {
    if (in_integers(how)) {
        add_integer_steps(p, c, how, sums, at, first, end, rows);
        return;
    }
    const int bytes = step_bytes(how), columns = bytes * (how >= INT4_GROUPS ? 2 : 1);
    const uint8_t *of_output = p->quantized + at * p->bytes;
    const Py_ssize_t group = first * columns >> p->shift, groups = ((end * columns - 1) >> p->shift) + 1;
    float scales[MOST_GROUPS];
    for (Py_ssize_t i = group; i < groups && is_grouped(how); i += FLOATS) {
        const Py_ssize_t from = at * p->groups + i;
        const Lanes near = first_lanes(p->outputs * p->groups - from);  // what lies there may be another output's
        store(scales + i - group, group_scales(p, at, i, near) * (how == VALUES4 ? p->unit : 1.0f));
    }
    for (Py_ssize_t i = first; i < end; i++) {
        const uint8_t *quantized = of_output + i * bytes;
        uint8_t edge[VECTOR > 32 ? VECTOR : 32];
        __builtin_prefetch(quantized + p->ahead, 0, 2);
        if ((i + 1) * bytes > p->bytes) {
            memset(edge, 0, sizeof edge);
            quantized = memcpy(edge, quantized, (size_t)(p->bytes % bytes));
        }
        const Py_ssize_t own = (i * columns >> p->shift) - group;
        const Element *x = p->x + i * step_elements(how);
        Floats parts[ROWS_AT_ONCE];
#pragma GCC unroll 8
        for (int k = 0; k < parts_of(how); k++) {
            const Floats some = decode(c, how, quantized, k);
            if (!rows) *sums++ = some;
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                const Floats with = floats(x + row * p->stride + k * FLOATS);
                parts[row] = k ? fused(some, with, parts[row]) : some * with;
            }
        }
        const Floats by = is_grouped(how) ? spread(scales + own, c->places) : all(1.0f);
        if (!rows && is_grouped(how)) *sums++ = by;
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) sums[row] = is_grouped(how) ? fused(parts[row], by, sums[row]) : sums[row] + parts[row];
    }
}

// Whether a number among those of an output makes none of all its sums, and sums do not show it.
FAST INLINE bool hides_nan(const Quantized *p, const Stored how, Py_ssize_t at) {
    uint8_t is_nan = 0;
    for (Py_ssize_t i = 0; is_float8(how) && i < p->bytes; i++) is_nan |= (p->quantized[at * p->bytes + i] & 0x7F) == 0x7F;
    return is_nan;
}

#endif
