// SPDX-License-Identifier: Apache-2.0
// Products of rows with a weight that is stored in 8 or 4 bits, fast for few rows.
//
// As with bfloat16 (products.c), reading the weight is what takes time, so there is time for about ten instructions for each 64 bytes. Codes become
// lanes of bfloat16, which holds each of them exactly, and are multiplied in pairs; sums are scaled, not codes. Where codes that lie in the
// same bytes come apart into several vectors, x is brought into that order once for all outputs, and the weight stays as it is stored. Of several
// rows tiles (`quantized_tiles.c`) decode each code once for all of them.

#include <stdlib.h>

#include "codes.h"
#include "product.h"

#if HAS_KERNELS

enum {
    MOST_ROWS = 8,    // rows of x at a time
    BYTES = 64,       // of codes at a time
    PARTS = 4,        // vectors that they become at most
    TOGETHER = 16,    // outputs whose totals are made at once, and for which a part of x stays in the nearest cache
    PAGE = 2 << 10,   // elements of x
    NEAR = 8 << 10,   // elements of x that the nearest cache holds beside what passes through it
    SMALL = 1 << 16,  // bytes of codes that take less time than waking threads
    SHARE = 1 << 18,  // bytes of codes that a thread takes at a time
    AHEAD = 4 << 10,  // bytes of codes that are fetched before they are needed: the processor does not look so far by itself
    MOST_ZERO = 16,   // zero points up to this leave a difference that has a place in the table
};

typedef struct {
    const uint8_t *codes;   // [outputs, bytes]
    const void *scales;     // [outputs, groups], float for FLOAT8, else bfloat16
    const uint8_t *zeros;   // [outputs, groups] for UINT4_GROUPS
    const uint16_t *x;      // [rows, stride], in the order of the parts
    const uint16_t *bias;   // [outputs] or NULL
    const uint16_t *added;  // [rows, outputs] or NULL
    uint16_t *y;            // [rows, outputs]
    Py_ssize_t rows, columns, stride, bytes, outputs, groups;
    Py_ssize_t turn;        // how many times BYTES of an output are multiplied before the next output is
    Py_ssize_t ahead;       // bytes from codes to those that are needed AHEAD later
    int shift;              // a group has 1 << shift columns
} Quantized;

INLINE int parts_of(const Stored how) { return how >= INT4_GROUPS ? 4 : 2; }

// Where a column is among `parts` vectors: neighbours are in the same bytes or next to each other, so each goes to a vector of its own.
INLINE Py_ssize_t place(Py_ssize_t column, const int parts) {
    const Py_ssize_t within = column % (parts * LANES);
    return column - within + within % parts * LANES + within / parts;
}

INLINE void arrange_as(const uint16_t *from, uint16_t *to, Py_ssize_t columns, const int parts) {
    const Py_ssize_t each = parts * LANES, whole = columns / each * each;
    for (Py_ssize_t at = 0; at < whole; at += each)
        for (int part = 0; part < parts; part++)
            for (int lane = 0; lane < LANES; lane++) to[at + part * LANES + lane] = from[at + lane * parts + part];
    for (Py_ssize_t at = whole; at < columns; at++) to[place(at, parts)] = from[at];
}

// Bring a row of x into the order of the codes; what is added at its end is zero.
FAST static void arrange(const uint16_t *from, uint16_t *to, Py_ssize_t columns, Py_ssize_t padded, const Stored how) {
    const Py_ssize_t each = parts_of(how) * LANES;
    if (columns < padded) memset(to + padded - each, 0, (size_t)each * sizeof *to);
    if (how <= INT8_GROUPS) memcpy(to, from, (size_t)columns * sizeof *to);
    else if (how == FLOAT8) arrange_as(from, to, columns, 2);
    else arrange_as(from, to, columns, 4);
}

// What is the same for all codes of a call.
typedef struct {
    __m512i table[4];
    __m512i places;  // for each pair of lanes which of the scales of BYTES is theirs
} Constants;

FAST INLINE Constants constants(const Quantized *p, const Stored how) {
    Constants c = {0};
    if (how == FLOAT8)
        for (int i = 0; i < 4; i++) c.table[i] = _mm512_loadu_si512(float8_values + 32 * i);
    else
        c.table[0] = _mm512_loadu_si512(how == UINT4_GROUPS ? integers : short_integers);
    if (how >= INT4_GROUPS) {
        uint16_t places[LANES];
        for (int i = 0; i < LANES; i++) places[i] = (uint16_t)(4 * i >> p->shift);
        c.places = _mm512_loadu_si512(places);
    }
    return c;
}

// The bytes at `codes`, or those that `there` marks, as integers: 16 of them, extended.
FAST INLINE __m512 sixteen(const uint8_t *codes, const bool is_whole, __mmask64 there, const int at) {
    const void *from = codes + 16 * at;
    const __mmask16 some = (__mmask16)(there >> 16 * at);
    const __m128i bytes = is_whole ? _mm_loadu_si128(from) : _mm_maskz_loadu_epi8(some, from);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// BYTES of codes as vectors of bfloat16; `zeros` is what to subtract from codes, in both bytes of each word.
FAST INLINE void decode(const Constants *c, const Stored how, const uint8_t *codes, __m512i zeros, const bool is_whole, __mmask64 there,
                        __m512bh *to) {
    if (how <= INT8_GROUPS) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++)
            to[i] = _mm512_cvtne2ps_pbh(sixteen(codes, is_whole, there, 2 * i + 1), sixteen(codes, is_whole, there, 2 * i));
        return;
    }
    const __m512i words = is_whole ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi8(there, codes);
    if (how == FLOAT8) {
        to[0] = float8(c->table, words, _mm512_slli_epi16(words, 8));
        to[1] = float8(c->table, _mm512_srli_epi16(words, 8), words);
    } else if (how == INT4_GROUPS) {
        to[0] = (__m512bh)_mm512_permutexvar_epi16(words, c->table[0]);
        to[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), c->table[0]);
        to[2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), c->table[0]);
        to[3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), c->table[0]);
    } else {
        const __m512i nibble = _mm512_set1_epi8(15);
        const __m512i low = _mm512_sub_epi8(_mm512_and_si512(words, nibble), zeros);
        const __m512i high = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(words, 4), nibble), zeros);
        to[0] = (__m512bh)_mm512_permutexvar_epi16(low, c->table[0]);
        to[1] = (__m512bh)_mm512_permutexvar_epi16(high, c->table[0]);
        to[2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(low, 8), c->table[0]);
        to[3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(high, 8), c->table[0]);
    }
}

// Add to `sums` what the BYTES number `i` of output `at` and all rows of x contribute.
FAST INLINE void add(const Quantized *p, const Constants *c, const Stored how, __m512 *sums, Py_ssize_t at, Py_ssize_t i, const int rows,
                     const bool is_whole, __mmask64 there) {
    const int parts = parts_of(how);
    const Py_ssize_t group = i * (parts * LANES) >> p->shift, first = at * p->groups + group;
    const uint16_t *from = (const uint16_t *)p->scales + first;
    __m512 scales[2];
    __m512i zeros = _mm512_setzero_si512();
    if (how >= INT4_GROUPS) {
        const Py_ssize_t count = parts * LANES >> p->shift, left = p->groups - group;
        const __mmask8 exist = (__mmask8)((1 << (is_whole || left > count ? count : left)) - 1);
        const __m512i loaded = _mm512_castsi128_si512(_mm_maskz_loadu_epi16(exist, from));
        _mm_prefetch((const char *)from + (p->ahead >> (p->shift - 2)), _MM_HINT_T1);
        scales[0] = (__m512)_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, c->places, loaded);
        if (how == UINT4_GROUPS) {
            const __m128i bytes = _mm_maskz_loadu_epi8(exist, p->zeros + first);
            _mm_prefetch((const char *)p->zeros + first + (p->ahead >> (p->shift - 1)), _MM_HINT_T1);
            zeros = _mm512_permutexvar_epi16(c->places, _mm512_castsi128_si512(_mm_unpacklo_epi8(bytes, bytes)));
        }
    } else if (how == INT8_GROUPS) {
        _mm_prefetch((const char *)from + (p->ahead >> (p->shift - 1)), _MM_HINT_T1);
        scales[0] = scales[1] = _mm512_set1_ps(widened(from[0]));
        if (1 << p->shift == LANES && (is_whole || there >> LANES)) scales[1] = _mm512_set1_ps(widened(from[1]));
    }
    const uint8_t *codes = p->codes + at * p->bytes + i * BYTES;
    __m512bh some[PARTS];
    _mm_prefetch(codes + p->ahead, _MM_HINT_T1);
    decode(c, how, codes, zeros, is_whole, there, some);
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        const uint16_t *x = p->x + row * p->stride + i * (parts * LANES);
        __m512 part = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int k = 0; k < parts; k++) {
            part = _mm512_dpbf16_ps(part, some[k], (__m512bh)_mm512_load_si512(x + k * LANES));
            if (how == INT8_GROUPS) sums[row] = _mm512_fmadd_ps(part, scales[k], sums[row]), part = _mm512_setzero_ps();
        }
        if (how >= INT4_GROUPS) sums[row] = _mm512_fmadd_ps(part, scales[0], sums[row]);
        if (!is_grouped(how)) sums[row] = _mm512_add_ps(sums[row], part);
    }
}

// What the lanes of sums are for each row of x.
typedef __m512 Sums[MOST_ROWS][TOGETHER];

// Add to the sums of an output, for all rows of x, its BYTES from number `first`; `how` and `rows` are constants wherever this is inlined.
FAST INLINE void tile(const Quantized *p, const Constants *c, const Stored how, Py_ssize_t at, Sums to, const int slot, Py_ssize_t first,
                      const int rows) {
    const Py_ssize_t whole = p->bytes / BYTES, end = first + p->turn < whole ? first + p->turn : whole;
    __m512 sums[MOST_ROWS];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) sums[row] = first ? to[row][slot] : _mm512_setzero_ps();
    for (Py_ssize_t i = first; i < end; i++) add(p, c, how, sums, at, i, rows, true, 0);
    if (first + p->turn > whole && whole * BYTES < p->bytes)
        add(p, c, how, sums, at, whole, rows, false, ((__mmask64)1 << p->bytes % BYTES) - 1);
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) to[row][slot] = sums[row];
}

// The sums of one output whose zero points are too large for the table.
FAST static void tile_of_any_zeros(const Quantized *p, Py_ssize_t at, Sums to, const int slot) {
    for (Py_ssize_t row = 0; row < p->rows; row++) {
        float sum = 0.0f;
        for (Py_ssize_t group = at * p->groups, column = 0; column < p->columns; group++) {
            float part = 0.0f;
            for (Py_ssize_t end = column + (1 << p->shift); column < end; column++) {
                const int code = p->codes[at * p->bytes + column / 2] >> column % 2 * 4 & 15;
                part += widened(p->x[row * p->stride + place(column, PARTS)]) * (float)(code - p->zeros[group]);
            }
            sum += part * widened(((const uint16_t *)p->scales)[group]);
        }
        to[row][slot] = _mm512_zextps128_ps512(_mm_set_ss(sum));
    }
}

// The sum of the lanes of each of TOGETHER vectors.
FAST INLINE __m512 totals(const __m512 *of) {
    __m512 pairs[8], fours[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(of[2 * i], of[2 * i + 1]), _mm512_unpackhi_ps(of[2 * i], of[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512d first = (__m512d)pairs[2 * i], second = (__m512d)pairs[2 * i + 1];
        fours[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(first, second), (__m512)_mm512_unpackhi_pd(first, second));
    }
    const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x44), _mm512_shuffle_f32x4(fours[0], fours[1], 0xEE));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x44), _mm512_shuffle_f32x4(fours[2], fours[3], 0xEE));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xDD));
}

// The values at `from` that `there` marks.
FAST INLINE __m512 widened_there(const uint16_t *from, __mmask16 there) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from)), 16);
}

// Write `count` outputs from `at`.
FAST INLINE void finish(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t count, Sums sums) {
    const __mmask16 there = (__mmask16)((1 << count) - 1);
    const __m512 bias = p->bias ? widened_there(p->bias + at, there) : _mm512_setzero_ps();
    const __m512 scales = how == FLOAT8 ? _mm512_maskz_loadu_ps(there, (const float *)p->scales + at)
        : is_grouped(how)               ? _mm512_set1_ps(1.0f)
                                        : widened_there((const uint16_t *)p->scales + at, there);
    for (Py_ssize_t row = 0; row < p->rows; row++) {
        __m512 y = _mm512_fmadd_ps(totals(sums[row]), scales, bias);
        if (p->added) y = _mm512_add_ps(y, widened_there(p->added + row * p->outputs + at, there));
        _mm256_mask_storeu_epi16(p->y + row * p->outputs + at, there, (__m256i)_mm512_cvtneps_pbh(y));
    }
}

// Whether all zero points of an output leave differences that are in the table.
FAST INLINE bool has_places(const Quantized *p, Py_ssize_t at) {
    __mmask64 too_large = 0;
    for (Py_ssize_t i = 0; i < p->groups; i += BYTES) {
        const __mmask64 there = p->groups - i < BYTES ? ((__mmask64)1 << (p->groups - i)) - 1 : ~(__mmask64)0;
        const __m512i zeros = _mm512_maskz_loadu_epi8(there, p->zeros + at * p->groups + i);
        too_large |= _mm512_cmpgt_epu8_mask(zeros, _mm512_set1_epi8(MOST_ZERO));
    }
    return !too_large;
}

FAST INLINE void outputs(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t end) {
    const Constants c = constants(p, how);
    Sums sums = {0};
    for (; at < end; at += TOGETHER) {
        const int count = end - at < TOGETHER ? (int)(end - at) : TOGETHER;
        for (Py_ssize_t first = 0; first * BYTES < p->bytes; first += p->turn) {
            for (int i = 0; i < count; i++) {
                if (how == UINT4_GROUPS && !has_places(p, at + i)) {
                    tile_of_any_zeros(p, at + i, sums, i);
                    continue;
                }
#define ROWS(rows) case rows: tile(p, &c, how, at + i, sums, i, first, rows); break;
                switch (p->rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
#undef ROWS
            }
        }
        finish(p, how, at, count, sums);
    }
}

#define OUTPUTS(how) \
    FAST static void outputs_##how(const void *product, Py_ssize_t at, Py_ssize_t end) { outputs(product, how, at, end); }
OUTPUTS(INT8) OUTPUTS(INT8_GROUPS) OUTPUTS(FLOAT8) OUTPUTS(INT4_GROUPS) OUTPUTS(UINT4_GROUPS)
#undef OUTPUTS

static const Share shares[] = {outputs_INT8, outputs_INT8_GROUPS, outputs_FLOAT8, outputs_INT4_GROUPS, outputs_UINT4_GROUPS};

const char *multiply_quantized(const struct multiply_quantized *n) {
    const Stored how = (Stored)n->stored;
    const Py_ssize_t columns = n->columns, outputs = n->outputs, groups = n->groups, group = groups ? columns / groups : 0;
    if (n->stored > UINT4_GROUPS) return refused("0 to %d for how codes are stored, got %zd", UINT4_GROUPS, n->stored);
    if (is_grouped(how) ? (group != 32 && group != 64 && group != 128) || columns % groups : groups != 1)
        return refused("groups of %s, got %zd of %zd columns", is_grouped(how) ? "32, 64 or 128" : "all columns", groups, columns);
    const bool are_few = n->rows < LEAST_BY_TILES || n->rows > MOST_BY_TILES;
    if (n->with_tiles && !are_few && how != UINT4_GROUPS && has_tiles()) return multiply_codes_by_tiles(n);
    const Py_ssize_t each = parts_of(how) * LANES, padded = (columns + each - 1) / each * each;
    // Rows whose addresses differ by multiples of a page would share few places of the nearest cache.
    const Py_ssize_t stride = MOST_ROWS * padded <= NEAR ? padded : (padded + PAGE - 1) / PAGE * PAGE + PAGE / MOST_ROWS;
    void *memory = malloc((size_t)(MOST_ROWS * stride) * sizeof(uint16_t) + BYTES);
    if (!memory) return no_memory;
    uint16_t *x = (uint16_t *)(((uintptr_t)memory + BYTES - 1) / BYTES * BYTES);
    Quantized p = {
        .codes = n->codes, .scales = n->scales, .zeros = n->zeros, .x = x, .bias = n->bias, .columns = columns, .stride = stride, .bytes = how >= INT4_GROUPS ? columns / 2 : columns,
        .outputs = outputs, .groups = groups, .shift = group == 32 ? 5 : group == 64 ? 6 : 7,
    };
    // From the second turn on the weight is read again, which takes less time than multiplying so many rows does.
    for (Py_ssize_t row = 0; row < n->rows; row += p.rows) {
        p.rows = n->rows - row < MOST_ROWS ? n->rows - row : MOST_ROWS;
        p.y = (uint16_t *)n->y + row * outputs;
        p.added = n->added ? (const uint16_t *)n->added + row * outputs : NULL;
        // Outputs lie one after the other, which is the order that memory likes best, unless x is larger than the nearest cache.
        const Py_ssize_t times = (p.bytes + BYTES - 1) / BYTES, turns = (p.rows * padded + NEAR - 1) / NEAR;
        p.turn = turns > 1 ? (times + turns - 1) / turns : times;
        p.ahead = turns > 1 ? (AHEAD / BYTES / p.turn + 1) * p.bytes : AHEAD;
        for (Py_ssize_t i = 0; i < p.rows; i++) arrange((const uint16_t *)n->x + (row + i) * columns, x + i * stride, columns, padded, how);
        in_shares(shares[how], &p, outputs, (SHARE / (p.bytes + 1) / TOGETHER + 1) * TOGETHER, outputs * p.bytes < SMALL ? 1 : (unsigned)n->threads);
    }
    free(memory);
    return NULL;
}

#endif
