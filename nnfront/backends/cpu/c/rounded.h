// SPDX-License-Identifier: Apache-2.0
// What weights in few bits stand for as bfloat16, each number rounded once: what products of many rows multiply.
//
// Numbers of 4 bits are places in a table of 16, which is made anew for each group: it takes a multiplication for all of them, and as few are rounded.

#ifndef NNFRONT_ROUNDED_H
#define NNFRONT_ROUNDED_H

#include "blocks.h"
#include "float8.h"

enum { VALUES = 16 };  // that four bits tell apart

#if AVX512

// Both as bfloat16, `low` first.
FAST INLINE __m512i rounded_pair(Floats low, Floats high) {
#if AVX512_BF16
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    uint16_t both[LANES];
    store_rounded(both, first_lanes(FLOATS), low), store_rounded(both + FLOATS, first_lanes(FLOATS), high);
    return _mm512_loadu_si512(both);
#endif
}

// LANES bytes as words, or the first of them.
FAST INLINE __m512i word_of_each(const uint8_t *from, Py_ssize_t count) {
    return _mm512_cvtepu8_epi16(count < LANES ? _mm256_maskz_loadu_epi8(((__mmask32)1 << count) - 1, from) : _mm256_loadu_si256((const __m256i *)from));
}

FAST INLINE void store_words(uint16_t *to, __m512i found, Py_ssize_t count) {
    if (count < LANES) _mm512_mask_storeu_epi16(to, ((__mmask32)1 << count) - 1, found);
    else _mm512_storeu_si512(to, found);
}

#endif

// FLOATS of the numbers of four bits, from `first` on, before they are scaled.
FAST INLINE Floats unscaled_values(const Quantized *p, const Stored how, const int first) {
    if (how == VALUES4) return __builtin_convertvector(signed_bytes((const uint8_t *)p->values + first), Floats) * p->unit;
    Ints numbers;
    for (int i = 0; i < FLOATS; i++) numbers[i] = how == INT4_GROUPS ? ((first + i) ^ 8) - 8 : first + i;
    return __builtin_convertvector(numbers, Floats);
}

// What numbers of four bits stand for in a group of an output.
FAST INLINE Floats values_in(const Quantized *p, const Stored how, Floats unscaled, Py_ssize_t at, Py_ssize_t group) {
    const float scale = scale_at(p->scales, p->kind, at * p->groups + group) * (p->factors ? p->factors[at] : 1.0f);
    return (unscaled - all(how == UINT4_GROUPS ? (float)p->zeros[at * p->groups + group] : 0.0f)) * all(scale);
}

// The columns `first` to `end` of output `at`, from a group on.
FAST INLINE void round_four_bits(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, uint16_t *to) {
    const uint8_t *quantized = p->quantized + at * p->bytes;
#if AVX512
    const Floats unscaled = unscaled_values(p, how, 0);
    __m512i table = _mm512_setzero_si512();
    // Lanes of the second of two groups look into the second half of the table, where those of one group have the same.
    const __m512i half = p->shift == 4 ? _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(VALUES), 1) : _mm512_setzero_si512();
    for (Py_ssize_t column = first; column < end; column += LANES) {
        const Py_ssize_t left = end - column, group = column >> p->shift;
        if (column == first || !(column & ((1 << p->shift) - 1))) {
            const Floats values = values_in(p, how, unscaled, at, group);
            table = rounded_pair(values, p->shift == 4 && left > VALUES ? values_in(p, how, unscaled, at, group + 1) : values);
        }
        const __m128i bytes = _mm_maskz_loadu_epi8(left < LANES ? (__mmask16)((1 << left / 2) - 1) : (__mmask16)-1, quantized + column / 2);
        const __m512i pairs = _mm512_cvtepu8_epi32(bytes), both = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
        const __m512i places = _mm512_ternarylogic_epi32(both, _mm512_set1_epi16(15), half, 0xEA);  // (both & 15) | half
        store_words(to + column - first, _mm512_permutexvar_epi16(places, table), left);
    }
#else
    for (Py_ssize_t column = first; column < end; column += 1 << p->shift) {
        uint16_t table[VALUES];
        for (int i = 0; i < VALUES; i += FLOATS) store_rounded(table + i, first_lanes(FLOATS), values_in(p, how, unscaled_values(p, how, i), at, column >> p->shift));
        for (Py_ssize_t i = column; i < column + (1 << p->shift); i += 2) {
            to[i - first] = table[quantized[i / 2] & 15];
            to[i - first + 1] = table[quantized[i / 2] >> 4];
        }
    }
#endif
}

// The same of integers of 8 bits.
FAST INLINE void round_integers(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, uint16_t *to) {
    const uint8_t *quantized = p->quantized + at * p->bytes;
    const Py_ssize_t length = how == INT8 ? end - first : 1 << p->shift;
    for (Py_ssize_t begin = first; begin < end; begin += length) {
        const Floats scale = all(scale_at(p->scales, p->kind, how == INT8 ? at : at * p->groups + (begin >> p->shift)));
        Py_ssize_t column = begin;
#if AVX512
        for (; column + LANES <= begin + length; column += LANES) {
            const Floats low = __builtin_convertvector(signed_bytes(quantized + column), Floats) * scale;
            store_words(to + column - first, rounded_pair(low, __builtin_convertvector(signed_bytes(quantized + column + FLOATS), Floats) * scale), LANES);
        }
#endif
        for (; column < begin + length; column += FLOATS) {
            const Lanes there = first_lanes(begin + length - column);
            const Ints wide = (Ints)(bytes_there(quantized + column, there) << 24) >> 24;
            store_rounded(to + column - first, there, __builtin_convertvector(wide, Floats) * scale);
        }
    }
}

// The same of float8 with one scale.
FAST INLINE void round_scaled_float8(const uint8_t *quantized, Floats scale, Py_ssize_t count, uint16_t *to) {
#if AVX512_BF16
    __m512i table[4];
    for (int i = 0; i < 4; i++) {
        const uint16_t *from = float8_values + LANES * i;
        table[i] = rounded_pair(widened_vector(from, first_lanes(FLOATS)) * scale, widened_vector(from + FLOATS, first_lanes(FLOATS)) * scale);
    }
    for (Py_ssize_t column = 0; column < count; column += LANES) {
        const __m512i words = word_of_each(quantized + column, count - column);
        store_words(to + column, (__m512i)float8(table, words, _mm512_slli_epi16(words, 8)), count - column);
    }
#else
    for (Py_ssize_t column = 0; column < count; column += FLOATS) {
        const Lanes there = first_lanes(count - column);
        store_rounded(to + column, there, decoded(bytes_there(quantized + column, there)) * scale);
    }
#endif
}

// The same of float8.
FAST INLINE void round_float8(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, uint16_t *to) {
    const Py_ssize_t length = how == FLOAT8 ? end - first : 1 << p->shift;
    for (Py_ssize_t begin = first; begin < end; begin += length) {
        const Floats scale = all(scale_at(p->scales, p->kind, how == FLOAT8 ? at : at * p->groups + (begin >> p->shift)));
        round_scaled_float8(p->quantized + at * p->bytes + begin, scale, length, to + begin - first);
    }
}

// A whole block.
FAST INLINE void round_block(const uint8_t *block, const Stored how, uint16_t *to) {
#if AVX512
    const Factors found = factors_of(block, how);
    float factors[FACTORS];
    memcpy(factors, &found, sizeof factors);
    const Floats from_zero = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512i nibble = _mm512_set1_epi16(15);
    const __m512i fifth = how == Q5_K ? word_of_each(block + 16, LANES) : _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int part = 0; part < 4; part++) {
        const __m512i words = word_of_each(block + nibbles_at(how) + LANES * part, LANES);
        const __m512i above = how == Q6_K ? word_of_each(block + above_at(how, part / 2), LANES) : fifth;
#pragma GCC unroll 2
        for (int is_high = 0; is_high < 2; is_high++) {
            __m512i places = is_high ? _mm512_srli_epi16(words, 4) : _mm512_and_si512(words, nibble);
            if (how == Q6_K) {
                const __m512i high = _mm512_slli_epi16(_mm512_and_si512(_mm512_srli_epi16(above, part % 2 * 2 + is_high * 4), _mm512_set1_epi16(3)), 4);
                const __m512i quantized = _mm512_sub_epi16(_mm512_or_si512(places, high), _mm512_set1_epi16(32));
                const int column = part / 2 * HALF + is_high * 64 + part % 2 * 32;
                const Floats low = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(quantized))) * all(factors[column / 16]);
                const Floats up = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(quantized, 1))) * all(factors[column / 16 + 1]);
                store_words(to + column, rounded_pair(low, up), LANES);
                continue;
            }
            const int group = 2 * part + is_high;
            const Floats scale = all(factors[group]), least = all(factors[8 + group]);
            const Floats values = from_zero * scale - least;
            const Floats more = how == Q5_K ? (from_zero + 16.0f) * scale - least : values;
            if (how == Q5_K) {
                const __m512i bit = _mm512_and_si512(group > 4 ? _mm512_srli_epi16(above, group - 4) : _mm512_slli_epi16(above, 4 - group), _mm512_set1_epi16(16));
                places = _mm512_or_si512(places, bit);
            }
            store_words(to + 32 * group, _mm512_permutexvar_epi16(places, rounded_pair(values, more)), LANES);
        }
    }
#else
    float values[BLOCK];
    values_of(block, how, values);
    for (int i = 0; i < BLOCK; i += FLOATS) store_rounded(to + i, first_lanes(FLOATS), floats(values + i));
#endif
}

// The columns `first` to `end` of output `at`; `first` is a multiple of BLOCK.
FAST INLINE void round_columns(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, uint16_t *to) {
    if (!in_blocks(how)) {
        if (how >= INT4_GROUPS) round_four_bits(p, how, at, first, end, to);
        else if (is_float8(how)) round_float8(p, how, at, first, end, to);
        else round_integers(p, how, at, first, end, to);
        return;
    }
    for (Py_ssize_t column = first; column < end; column += BLOCK) {
        const Py_ssize_t byte = column / BLOCK * block_bytes(how);
        uint8_t copy[MOST_BYTES];
        uint16_t whole[BLOCK];
        const uint8_t *block = whole_block(p->quantized + at * p->bytes + byte, how, p->bytes - byte, copy);
        const bool is_half = end - column < BLOCK;
        round_block(block, how, is_half ? whole : to + column - first);
        if (is_half) memcpy(to + column - first, whole, HALF * sizeof *to);
    }
}

#endif
