// SPDX-License-Identifier: Apache-2.0
// Quantised values as bfloat16, which holds each of them exactly, for processors that multiply it in pairs (AVX512_BF16).
//
// There is time for about ten instructions for each 64 bytes. Quantised values are looked up in registers; where those that lie in the same bytes come apart into
// several vectors, x is brought into that order once for all outputs, and the weight stays as it is stored.

#ifndef NNFRONT_QUANTIZED_VALUES_BF16_H
#define NNFRONT_QUANTIZED_VALUES_BF16_H

#include "quantized_values.h"

enum {
    BYTES = 64,  // of quantised values in a step
    QUARTER = BYTES / 4,
    OUTPUTS_IN_TURN = 4,
};

#define EIGHT(e) N(e, 0), N(e, 1), N(e, 2), N(e, 3), N(e, 4), N(e, 5), N(e, 6), N(e, 7)
#define N(e, m) (e + 120) << 7 | m << 4

// What the quantised values 0 to 127 of float8 stand for; those of exponent 0 are multiples of 2^-9, and the last one is NaN.
static const uint16_t float8_values[128] = {
    0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60, EIGHT(1), EIGHT(2), EIGHT(3), EIGHT(4), EIGHT(5), EIGHT(6), EIGHT(7), EIGHT(8),
    EIGHT(9), EIGHT(10), EIGHT(11), EIGHT(12), EIGHT(13), EIGHT(14), N(15, 0), N(15, 1), N(15, 2), N(15, 3), N(15, 4), N(15, 5), N(15, 6), 0x7FC0,
};
#undef N
#undef EIGHT

// Numbers of four bits, and of those without a sign eight less than each: the fifth bit of an index, which is the next value's, does not matter.
static const uint16_t integers[32] = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
}, less_eight[32] = {
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
};

// The quantised value in the low byte of each word of `low`; its sign is the highest bit of `high`.
FAST INLINE __m512bh float8(const __m512i *table, __m512i low, __m512i high) {
    const __mmask32 is_upper = _mm512_test_epi16_mask(low, _mm512_set1_epi16(0x40));
    const __m512i first = _mm512_permutex2var_epi16(table[0], low, table[1]);
    const __m512i second = _mm512_permutex2var_epi16(table[2], low, table[3]);
    const __m512i size = _mm512_mask_mov_epi16(first, is_upper, second);
    return (__m512bh)_mm512_ternarylogic_epi32(size, high, _mm512_set1_epi16((short)0x8000), 0x78);  // size ^ (high & sign)
}

INLINE int step_bytes(const Stored how) { return BYTES; }

INLINE int parts_of(const Stored how) { return how >= INT4_GROUPS ? 4 : 2; }

INLINE int step_elements(const Stored how) { return parts_of(how) * LANES; }

// Where a column is among `parts` vectors: neighbours are in the same bytes or next to each other, so each goes to a vector of its own.
INLINE Py_ssize_t place(Py_ssize_t column, const int parts) {
    const Py_ssize_t within = column % (parts * LANES);
    return column - within + within % parts * LANES + within / parts;
}

// The first and then the second of each pair in two vectors.
FAST INLINE void part_pairs(__m512i x, __m512i y, __m512i *to) {
    uint16_t first[LANES];
    for (int i = 0; i < LANES; i++) first[i] = (uint16_t)(2 * i);
    const __m512i from = _mm512_loadu_si512(first);
    to[0] = _mm512_permutex2var_epi16(x, from, y), to[1] = _mm512_permutex2var_epi16(x, _mm512_add_epi16(from, _mm512_set1_epi16(1)), y);
}

FAST INLINE void arrange_as(const uint16_t *from, uint16_t *to, Py_ssize_t columns, const int parts) {
    const Py_ssize_t each = parts * LANES, whole = columns / each * each;
    for (Py_ssize_t at = 0; at < whole; at += each) {
        __m512i pairs[4], some[4];
        for (int i = 0; i < parts; i += 2) part_pairs(_mm512_loadu_si512(from + at + i * LANES), _mm512_loadu_si512(from + at + (i + 1) * LANES), pairs + i);
        if (parts == 2) some[0] = pairs[0], some[1] = pairs[1];
        else {
            __m512i odd[2];
            part_pairs(pairs[0], pairs[2], some), part_pairs(pairs[1], pairs[3], odd);
            some[2] = some[1], some[1] = odd[0], some[3] = odd[1];
        }
        for (int part = 0; part < parts; part++) _mm512_storeu_si512(to + at + part * LANES, some[part]);
    }
    for (Py_ssize_t at = whole; at < columns; at++) to[place(at, parts)] = from[at];
}

// Bring a row of x into the order of the quantised values; what is added at its end is zero.
FAST static void arrange(const uint16_t *from, uint16_t *to, Py_ssize_t columns, Py_ssize_t steps, const Stored how) {
    const int each = step_elements(how);
    if (columns < steps * each) memset(to + (steps - 1) * each, 0, (size_t)each * sizeof *to);
    if (how <= INT8_GROUPS)
        // The halves of two groups of 32 in each vector, so that they are scaled at once.
        for (Py_ssize_t at = 0; at < columns; at += QUARTER) {
            const Py_ssize_t quarter = at / QUARTER % 4, left = columns - at;
            memcpy(to + at + (quarter == 1 ? QUARTER : quarter == 2 ? -QUARTER : 0), from + at, (size_t)(left < QUARTER ? left : QUARTER) * sizeof *to);
        }
    else if (is_float8(how)) arrange_as(from, to, columns, 2);
    else arrange_as(from, to, columns, 4);
}

// What is the same for all quantised values of a call.
typedef struct {
    __m512i table[4];
    __m512i places;  // for each pair of lanes which of the scales of BYTES is theirs
} Constants;

FAST INLINE Constants constants(const Quantized *p, const Stored how) {
    Constants c = {0};
    if (is_float8(how))
        for (int i = 0; i < 4; i++) c.table[i] = _mm512_loadu_si512(float8_values + 32 * i);
    else if (how == VALUES4) {
        const Floats values = __builtin_convertvector(signed_bytes((const uint8_t *)p->values), Floats) * p->unit;
        c.table[0] = (__m512i)_mm512_cvtne2ps_pbh((__m512)values, (__m512)values);
    } else if (how >= INT4_GROUPS)
        c.table[0] = _mm512_loadu_si512(how == UINT4_GROUPS ? less_eight : integers);
    else {
        uint16_t upper_halves[LANES];
        for (int i = 0; i < LANES; i++) upper_halves[i] = (uint16_t)(2 * i + 1);
        c.table[0] = _mm512_loadu_si512(upper_halves);
    }
    if (how >= INT4_GROUPS) {
        uint16_t places[LANES];
        for (int i = 0; i < LANES; i++) places[i] = (uint16_t)(4 * i >> p->shift);
        c.places = _mm512_loadu_si512(places);
    }
    return c;
}

// The bytes at `quantized`, or those that `there` marks, as integers: 16 of them, extended.
FAST INLINE __m512 sixteen(const uint8_t *quantized, const bool is_whole, __mmask64 there, const int at) {
    const void *from = quantized + 16 * at;
    const __mmask16 some = (__mmask16)(there >> 16 * at);
    const __m128i bytes = is_whole ? _mm_loadu_si128(from) : _mm_maskz_loadu_epi8(some, from);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// Vector `k` of what the quantised values of a step become, as bfloat16; `words` are these values where they are looked up.
FAST INLINE __m512bh decode(const Constants *c, const Stored how, const uint8_t *quantized, __m512i words, const bool is_whole, __mmask64 there, const int k, const bool has_registers) {
    if (how <= INT8_GROUPS) {
        const __m512 low = sixteen(quantized, is_whole, there, k), high = sixteen(quantized, is_whole, there, k + 2);
        // Floats of 8 bits are bfloat16 in their upper halves, which are brought together faster than floats are rounded, by a table.
        return has_registers ? (__m512bh)_mm512_permutex2var_epi16((__m512i)low, c->table[0], (__m512i)high) : _mm512_cvtne2ps_pbh(high, low);
    }
    if (is_float8(how)) return k ? float8(c->table, _mm512_srli_epi16(words, 8), words) : float8(c->table, words, _mm512_slli_epi16(words, 8));
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * k), c->table[0]);
}

// What the sums of the lanes of step `i` of output `at` are scaled by.
FAST INLINE Floats step_scales(const Quantized *p, const Constants *c, const Stored how, Py_ssize_t at, Py_ssize_t i, const bool is_whole, __mmask64 there) {
    const int parts = parts_of(how), log = scale_bytes_log2(p->kind);
    const Py_ssize_t group = i * (parts * LANES) >> p->shift, first = at * p->groups + group;
    const char *from = (const char *)p->scales + (first << log);
    if (how >= INT4_GROUPS) {
        const Py_ssize_t count = parts * LANES >> p->shift, left = p->groups - group;
        const __mmask8 exist = (__mmask8)((1 << (is_whole || left > count ? count : left)) - 1);
        _mm_prefetch(from + (p->ahead >> (p->shift - 1 - log)), _MM_HINT_T1);
        if (p->kind != BFLOAT16_SCALES) return _mm512_permutexvar_ps(_mm512_srli_epi32(c->places, 16), group_scales(p, at, group, exist));
        return (__m512)_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, c->places, _mm512_castsi128_si512(_mm_maskz_loadu_epi16(exist, from)));
    }
    if (!is_grouped(how)) return all(1.0f);
    _mm_prefetch(from + (p->ahead >> (p->shift - log)), _MM_HINT_T1);
    const Floats scales = all(scale_at(p->scales, p->kind, first));
    if (how != INT8_GROUPS || 1 << p->shift != LANES || !(is_whole || there >> LANES)) return scales;
    return _mm512_mask_mov_ps(scales, 0xFF00, all(scale_at(p->scales, p->kind, first + 1)));
}

// Whether products are added to sums as they come, and not first to those of a step, which wait for one another less.
INLINE bool adds_at_once(const Stored how) { return !is_grouped(how); }

// How many outputs a few rows of x are multiplied with in turn.
INLINE int outputs_in_turn(const Stored how, const int rows) { return rows == 1 ? OUTPUTS_IN_TURN : rows == 2 || (adds_at_once(how) && rows <= 4) ? OUTPUTS_IN_TURN / 2 : 1; }

// Add to `sums`, [output, row], what the quantised values of step `i` of `each` outputs from `at` on, `apart`, and the first rows of x contribute; of no rows write there what these are
// multiplied with, decoded. Outputs take turns: the products of one wait for each other, and would fill what the processor looks ahead.
FAST INLINE void add_step(const Quantized *p, const Constants *c, const Stored how, Floats *sums, Py_ssize_t at, Py_ssize_t i, const int rows, const int each,
                          const bool is_whole) {
    const int parts = parts_of(how);
    const __mmask64 there = is_whole ? 0 : ((__mmask64)1 << p->bytes % BYTES) - 1;
    const Py_ssize_t apart = p->apart * p->bytes;
    const uint8_t *quantized = p->quantized + at * p->bytes + i * BYTES;
    __m512i words[OUTPUTS_IN_TURN];
    Floats scales[OUTPUTS_IN_TURN], part[ROWS_AT_ONCE];
#pragma GCC unroll 4
    for (int j = 0; j < each; j++) {
        const uint8_t *from = quantized + j * apart;
        scales[j] = step_scales(p, c, how, at + j * p->apart, i, is_whole, there);
        _mm_prefetch(from + p->ahead, _MM_HINT_T1);
        words[j] = how <= INT8_GROUPS ? _mm512_setzero_si512() : is_whole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8(there, from);
    }
#pragma GCC unroll 8
    for (int j = 0; j < each * rows; j++) part[j] = adds_at_once(how) ? sums[j] : all(0.0f);
#pragma GCC unroll 4
    for (int k = 0; k < parts; k++)
#pragma GCC unroll 4
        for (int j = 0; j < each; j++) {
            const __m512bh some = decode(c, how, quantized + j * apart, words[j], is_whole, there, k, rows > 0);
            if (!rows) sums[k] = (Floats)some;
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++)
                part[j * rows + row] = _mm512_dpbf16_ps(part[j * rows + row], some, (__m512bh)_mm512_load_si512(p->x + row * p->stride + (i * parts + k) * LANES));
        }
    if (!rows && is_grouped(how)) sums[parts] = scales[0];
#pragma GCC unroll 8
    for (int j = 0; j < each * rows; j++) sums[j] = adds_at_once(how) ? part[j] : fused(part[j], scales[j / rows], sums[j]);
}

// The same of the steps `first` to `end`.
FAST INLINE void add_steps(const Quantized *p, const Constants *c, const Stored how, Floats *sums, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end,
                           const int rows, const int each) {
    const Py_ssize_t whole = p->bytes / BYTES;
    const int next = rows ? 0 : parts_of(how) + is_grouped(how);
    for (Py_ssize_t i = first; i < (end < whole ? end : whole); i++, sums += next) add_step(p, c, how, sums, at, i, rows, each, true);
    if (end > whole) add_step(p, c, how, sums, at, whole, rows, each, false);
}

// Whether quantised values are multiplied as integers, and what they are multiplied as more than they stand for taken from the sums of each step.
INLINE bool in_integers(const Stored how) { return false; }
INLINE bool is_taken_from_steps(const Stored how) { return false; }
FAST INLINE void sum_integers(const Element *x, float *to, Py_ssize_t groups, const int shift) {}

// Whether quantised values are multiplied as less than they stand for before their zero points are taken from them, and by how much.
INLINE bool has_offset(const Stored how) { return how == UINT4_GROUPS; }
INLINE float offset_of(const Quantized *p, const Stored how) { return 8.0f; }

// Whether a number among those of an output makes none of all its sums, and sums do not show it.
INLINE bool hides_nan(const Quantized *p, const Stored how, Py_ssize_t at) { return false; }

#endif
