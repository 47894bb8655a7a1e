// SPDX-License-Identifier: Apache-2.0
// Weights in 8 or 4 bits: how they are stored, and what those who multiply with them share.

#ifndef NNFRONT_QUANTIZED_VALUES_H
#define NNFRONT_QUANTIZED_VALUES_H

#include "float8.h"

// How a weight is stored: what its quantised values are, and how far a scale reaches.
typedef enum {
    INT8,            // a scale for each output
    INT8_GROUPS,     // a scale for each group of columns
    FLOAT8,          // e4m3fn, a scale for each output
    FLOAT8_GROUPS,   // the same, a scale for each 128 columns
    INT4_GROUPS,     // two to a byte, the first one low, in [-8, 7], a scale for each group
    UINT4_GROUPS,    // the same in [0, 15], with a zero point for each group
    VALUES4,         // two to a byte, places in a table of 16 values, a scale for each group
    Q4_K,            // blocks of 256 columns with all that belongs to them (blocks.h), the last one of a row maybe half as long
    Q5_K,
    Q6_K,
} Stored;

// What scales are: bfloat16, float, powers of two by their exponents (e8m0), or float8 (e4m3fn) times a float of their output.
typedef enum { BFLOAT16_SCALES, FLOAT_SCALES, POWERS, FLOAT8_SCALES } Scales;

INLINE bool in_blocks(const Stored how) { return how >= Q4_K; }

INLINE bool is_float8(const Stored how) { return how == FLOAT8 || how == FLOAT8_GROUPS; }

INLINE bool is_grouped(const Stored how) { return how == INT8_GROUPS || how >= FLOAT8_GROUPS; }

// Whether registers hold the sums of eight rows. Where they do not, in portable C, so many take no less time, and twice as long to compile.
#define MANY_REGISTERS (VECTOR * REGISTERS > 256)

enum {
    BLOCK = 256,            // columns
    ROWS_AT_ONCE = MANY_REGISTERS ? 8 : 4,  // of x that are multiplied with what is decoded while it is in registers
    BLOCK_ROWS = REGISTERS / 8,  // of x that are multiplied at a time where there are more
    BLOCK_OUTPUTS = 3,      // with these, decoded before
    PANEL_OUTPUTS = 2 * BLOCK_OUTPUTS,  // decoded at a time, so that x comes near once for all of them
    OUTPUTS_TOGETHER = 2 * PANEL_OUTPUTS,  // that are written at once, and for which a part of x stays in the nearest cache
    ROWS_TOGETHER_MOST = 128,  // of x for which a weight is decoded once
    NEAR_ARRANGED = 16 << 10,  // bytes of x, or of what is decoded, that the nearest cache holds beside what passes through it
    LARGE_ARRANGED = 1 << 19,  // bytes of x that the next cache holds
    SMALL_QUANTIZED = 1 << 16,  // bytes of quantised values that take less time than waking threads
    QUANTIZED_SHARE = 1 << 18,  // bytes of quantised values that a thread takes at a time
    BYTES_AHEAD = 4 << 10,  // bytes of quantised values that are fetched before they are needed: the processor does not look so far by itself
};

// What x is brought to: the numbers that decoded values are multiplied with.
#if AVX512_BF16
typedef uint16_t Element;
#else
typedef float Element;
#endif

typedef struct {
    const uint8_t *quantized;  // [outputs, bytes]
    const void *scales;     // [outputs, groups]
    const uint8_t *zeros;   // [outputs, groups] for UINT4_GROUPS
    const float *factors;   // [outputs] for FLOAT8_SCALES, given in the place of zeros
    Element *x;             // [usual, stride], in the order of the quantised values
    float *sums;            // of x over groups, [usual, next_sums], zero behind them, where quantised values are multiplied as more or less than they stand for
    const uint16_t *plain;  // x as it was given, [rows, columns]
    const Py_ssize_t *places;  // of rows: of those in x, and then of those that are multiplied as they were given
    const uint16_t *bias;   // [outputs] or NULL
    const uint16_t *added;  // [rows, outputs] or NULL
    void *y;                // [rows, outputs], float if is_wide, else bfloat16
    Py_ssize_t rows, usual, columns, stride, next_sums, bytes, outputs, groups;
    Py_ssize_t apart;       // how far apart outputs are that take turns
    Py_ssize_t turn;        // how many steps of an output are multiplied before the next output is
    Py_ssize_t ahead;       // bytes from quantised values to those that are needed BYTES_AHEAD later
    int shift;              // a group has 1 << shift columns
    Stored how;
    Scales kind;            // of scales
    bool is_wide;
    float unit;             // of which values are multiples
    int8_t values[16];      // for VALUES4
} Quantized;

// Of how many bits the size of a group is a power.
INLINE int shift_of(Py_ssize_t columns, Py_ssize_t groups) {
    const Py_ssize_t group = groups ? columns / groups : 0;
    return group == 16 ? 4 : group == 32 ? 5 : group == 64 ? 6 : 7;
}

// Why numbers are not those of a weight; NULL if they are.
static const char *unlike(const Stored how, Py_ssize_t stored, Py_ssize_t columns, Py_ssize_t groups, Py_ssize_t kind) {
    const Py_ssize_t group = groups ? columns / groups : 0;
    if (stored > Q6_K) return refused("0 to %d for how values are stored, got %zd", Q6_K, stored);
    if (kind > FLOAT8_SCALES) return refused("0 to %d for what scales are, got %zd", FLOAT8_SCALES, kind);
    if (kind == FLOAT8_SCALES && how != VALUES4) return refused("scales in float8 of values of a table, got %d for how values are stored", how);
    if (in_blocks(how)) return columns % (BLOCK / 2) ? refused("columns that %d divides, got %zd", BLOCK / 2, columns) : NULL;
    const bool is_known = group == 128 || (how != FLOAT8_GROUPS && (group == 32 || group == 64)) || (group == 16 && how == VALUES4);
    if (is_grouped(how) ? !is_known || columns % groups : groups != 1)
        return refused("groups of %s, got %zd of %zd columns", !is_grouped(how) ? "all columns" : how == FLOAT8_GROUPS ? "128" : "32, 64 or 128", groups, columns);
    return NULL;
}

// The bytes of an output.
INLINE Py_ssize_t bytes_of(const Stored how, Py_ssize_t columns) {
    static const Py_ssize_t blocks[][2] = {{144, 80}, {176, 112}, {210, 106}};
    if (in_blocks(how)) return columns / BLOCK * blocks[how - Q4_K][0] + (columns % BLOCK ? blocks[how - Q4_K][1] : 0);
    return how >= INT4_GROUPS ? columns / 2 : columns;
}

// 2^(exponent - 127), NaN of 255.
INLINE float power(uint8_t exponent) {
    const uint32_t bits = exponent == 255 ? 0x7FC00000 : exponent ? (uint32_t)exponent << 23 : 1u << 22;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

// The scale in a place of all, without a factor.
FAST INLINE float scale_at(const void *scales, const Scales kind, Py_ssize_t at) {
    if (kind == POWERS) return power(((const uint8_t *)scales)[at]);
    if (kind == FLOAT8_SCALES) return decoded((Bits){((const uint8_t *)scales)[at]})[0];
    return kind == FLOAT_SCALES ? ((const float *)scales)[at] : widened(((const uint16_t *)scales)[at]);
}

// FLOATS of them, or the first of them that `there` marks.
FAST INLINE Floats scales_there(const void *scales, const Scales kind, Py_ssize_t at, Lanes there) {
    if (kind < POWERS) return elements(scales, kind == FLOAT_SCALES, at, there);
    if (kind == FLOAT8_SCALES) return decoded_there((const uint8_t *)scales + at, there);
    const Bits exponents = bytes_there((const uint8_t *)scales + at, there), is_least = (Bits)(exponents == 0), is_nan = (Bits)(exponents == 255);
    return (Floats)((exponents << 23 & ~is_nan) | (is_least & (1u << 22)) | (is_nan & 0x7FC00000));
}

// The logarithm of a scale's bytes.
INLINE int scale_bytes_log2(const Scales kind) { return kind >= POWERS ? 0 : kind == FLOAT_SCALES ? 2 : 1; }

// The scales of FLOATS groups of an output from one on, or of the first of them that `there` marks.
FAST INLINE Floats group_scales(const Quantized *p, Py_ssize_t at, Py_ssize_t group, Lanes there) {
    const Floats found = scales_there(p->scales, p->kind, at * p->groups + group, there);
    return p->factors ? found * all(p->factors[at]) : found;
}

// Whether quantised values may be multiplied as more or less than they stand for: sums of what is not finite, or near the largest number, say nothing.
FAST static bool are_usual(const uint16_t *x, Py_ssize_t count) {
    uint16_t largest = 0;
    for (Py_ssize_t i = 0; i < count; i++) largest = (x[i] & 0x7F80) > largest ? x[i] & 0x7F80 : largest;
    return largest < 0x7000;
}

// The sums of a row of x over groups, and zeros behind them.
FAST static void sum_groups(const uint16_t *x, float *to, Py_ssize_t groups, const int shift) {
    for (Py_ssize_t group = 0; group < groups + FLOATS; group++, x += 1 << shift) {
        to[group] = 0.0f;
        for (int i = 0; group < groups && i < 1 << shift; i++) to[group] += widened(x[i]);
    }
}

// Add to the sums of an output and of the first rows of x, `next` apart, what its quantised values are more than they have been multiplied as: `offset`, less their zero points.
FAST INLINE void add_group_sums(const Quantized *p, const Stored how, Floats *sums, const int next, Py_ssize_t at, const float offset, Py_ssize_t rows) {
    for (Py_ssize_t i = 0; i < p->groups; i += FLOATS) {
        const Py_ssize_t from = at * p->groups + i;
        const Lanes near = first_lanes(p->outputs * p->groups - from);  // what lies there may be another output's
        Floats by = only(first_lanes(p->groups - i), group_scales(p, at, i, near));
        by *= how == UINT4_GROUPS ? offset - __builtin_convertvector((Ints)bytes_there(p->zeros + from, near), Floats) : all(offset);
        for (Py_ssize_t row = 0; row < rows; row++) sums[row * next] = fused(by, floats(p->sums + row * p->next_sums + i), sums[row * next]);
    }
}

// The weight that a call names, without what is multiplied with it.
#define WEIGHT_OF(n, count) \
    { \
        .quantized = (n)->quantized, .scales = (n)->scales, .zeros = (n)->zeros, .columns = (n)->columns, .outputs = (count), \
        .bytes = bytes_of((Stored)(n)->stored, (n)->columns), .groups = (n)->groups, .shift = shift_of((n)->columns, (n)->groups), \
        .kind = (Scales)(n)->scale_kind, .factors = (n)->scale_kind == FLOAT8_SCALES ? (const float *)(n)->zeros : NULL, .unit = (float)(n)->unit, \
        .values = {FOUR_BYTES((n)->values0), FOUR_BYTES((n)->values1), FOUR_BYTES((n)->values2), FOUR_BYTES((n)->values3)}, \
    }
#define FOUR_BYTES(of) (int8_t)(of), (int8_t)((of) >> 8), (int8_t)((of) >> 16), (int8_t)((of) >> 24)

// The product of a row, as it was given, with an output of 4 bits where vectors cannot make it.
FAST static float sum_one_by_one(const Quantized *p, const Stored how, Py_ssize_t at, const uint16_t *row) {
    float sum = 0.0f;
    for (Py_ssize_t group = at * p->groups, column = 0; column < p->columns; group++) {
        float part = 0.0f;
        for (Py_ssize_t end = column + (1 << p->shift); column < end; column++) {
            const int number = p->quantized[at * p->bytes + column / 2] >> column % 2 * 4 & 15;
            const int value = how == VALUES4 ? p->values[number] : how == UINT4_GROUPS ? number - p->zeros[group] : (number ^ 8) - 8;
            part += widened(row[column]) * (float)value;
        }
        sum += part * (scale_at(p->scales, p->kind, group) * (how == VALUES4 ? p->unit : 1.0f) * (p->factors ? p->factors[at] : 1.0f));
    }
    return sum;
}

#endif
