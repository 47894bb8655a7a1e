// SPDX-License-Identifier: Apache-2.0
// Products of many rows with a bfloat16 weight where an instruction multiplies bfloat16 in pairs.
//
// The rows of the weight that are multiplied at a time lie beside one another, in the order in which they are read: as they are they may be a power of two
// apart, whose multiples share few places of the nearest cache. Results are made of sums of several such blocks, whole vectors of them. The order of sums is that of `products.c`.

#include "product.h"

enum {
    MANY_ROWS = 512,  // of x, that are multiplied with rows of the weight which are near
    MOST_COLUMNS_NEAR = 1 << 15,  // of these rows: of longer ones they are multiplied as they lie
    KEPT_SUMS = 96,  // of a row of x, until results are made of them: a multiple of WIDE and of two vectors
    BLOCK_SUMS = WIDE * ROWS_TOGETHER,
    FEW_AS_THEY_LIE = 64,  // rows that are multiplied faster with a weight as it lies
    MANY_SHARE = 24,  // outputs that a thread takes at least
};

typedef float Kept[KEPT_SUMS * ROWS_TOGETHER + 16];  // sums [output, half, row] of a part of the rows, with room for `store_totals`

// A block of the weight: where its rows are, those of gates before their other halves, and their columns beside one another, LANES of each row in turn.
typedef struct {
    const uint16_t *rows[WIDE];
    uint16_t near[WIDE * (MOST_COLUMNS_NEAR + LANES)] __attribute__((aligned(64)));
} NearBlock;

// Add to `sums`, [output, half, row], what LANES columns from `at` on contribute. The first rows of x have a block brought near.
FAST INLINE void add_near(Floats *sums, NearBlock *block, const uint16_t *const *x, Py_ssize_t at, Py_ssize_t columns, const int halves, const bool is_first, const bool is_whole) {
    const int each = WIDE / halves;
    uint16_t *near = block->near + at * WIDE;
    Words some[WIDE];
#pragma GCC unroll 6
    for (int j = 0; j < WIDE; j++) {
        some[j] = is_first ? values_at(block->rows[j] + at, is_whole, columns - at) : words(near + j * LANES);
        if (is_first) memcpy(near + j * LANES, &some[j], sizeof some[j]);
    }
#pragma GCC unroll 4
    for (int row = 0; row < ROWS_TOGETHER; row++) {
        const Words with = values_at(x[row] + at, is_whole, columns - at);
#pragma GCC unroll 6
        for (int j = 0; j < WIDE; j++) {
            Floats *sum = sums + (j % each * halves + j / each) * ROWS_TOGETHER + row;
            *sum = dot(*sum, some[j], with);
        }
    }
}

// The totals [output, half, row] of a block and a part of the rows of x.
FAST INLINE void multiply_near(float *totals, NearBlock *block, const Product *p, Py_ssize_t part, const int halves, const bool is_first) {
    const Py_ssize_t columns = p->columns, whole = columns / LANES * LANES;
    const uint16_t *x[ROWS_TOGETHER];
    for (int row = 0; row < ROWS_TOGETHER; row++) x[row] = p->x + least(part * ROWS_TOGETHER + row, p->rows - 1) * columns;
    Floats sums[BLOCK_SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < BLOCK_SUMS; i++) sums[i] = all(0.0f);
    for (Py_ssize_t at = 0; at < whole; at += LANES) add_near(sums, block, x, at, columns, halves, is_first, true);
    if (whole < columns) add_near(sums, block, x, whole, columns, halves, is_first, false);
    store_totals(totals, sums, BLOCK_SUMS);
}

// Make results of what a part of the rows has given, with `count` outputs from `at` on.
FAST INLINE void finish_part(const Product *p, const Kept kept, Py_ssize_t first, Py_ssize_t at, Py_ssize_t count, const int halves) {
    float sums[2][ROWS_TOGETHER][KEPT_SUMS + FLOATS];
    for (int i = 0; i < KEPT_SUMS / halves; i++)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
#pragma GCC unroll 4
            for (int row = 0; row < ROWS_TOGETHER; row++) sums[half][row][i] = kept[(i * halves + half) * ROWS_TOGETHER + row];
    for (int row = 0; row < ROWS_TOGETHER && first + row < p->rows; row++) finish_row(p, first + row, at, count, sums[0][row], sums[1][row], halves);
}

// Where a row of the weight is: of `half` the output `at`, or the last one.
INLINE const uint16_t *row_of(const Product *p, int half, Py_ssize_t at) { return p->weight + (half * p->outputs + least(at, p->outputs - 1)) * p->columns; }

// The outputs `at` to `end` of up to MANY_ROWS rows.
FAST INLINE void multiply_many_blocks(const Product *p, Py_ssize_t at, Py_ssize_t end, const int halves) {
    const Py_ssize_t each = WIDE / halves, parts = (p->rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
    const Py_ssize_t ahead = (each * p->columns / (LINE / 2) + parts - 2) / (parts - 1);  // lines of each half of the next block that a part fetches
    NearBlock block;
    Kept kept[MANY_ROWS / ROWS_TOGETHER];
    for (; at < end; at += KEPT_SUMS / halves) {
        const Py_ssize_t count = least(end - at, KEPT_SUMS / halves);
        for (Py_ssize_t i = 0; i < count; i += each) {
            const uint16_t *next = row_of(p, 0, at + i + each);
            for (int j = 0; j < WIDE; j++) block.rows[j] = row_of(p, j / (int)each, at + i + j % each);
            multiply_near(kept[0] + i * halves * ROWS_TOGETHER, &block, p, 0, halves, true);
            for (Py_ssize_t part = 1; part < parts; part++) {
                for (Py_ssize_t line = 0; line < ahead; line++, next += LINE / 2)
                    for (int half = 0; half < halves; half++) __builtin_prefetch(next + half * p->outputs * p->columns, 0, 2);
                multiply_near(kept[part] + i * halves * ROWS_TOGETHER, &block, p, part, halves, false);
            }
        }
        for (Py_ssize_t part = 0; part < parts; part++) finish_part(p, kept[part], part * ROWS_TOGETHER, at, count, halves);
    }
}

// Whether there are so many rows that bringing the weight near pays.
INLINE bool are_many(const Product *p) { return p->rows > FEW_AS_THEY_LIE && p->columns <= MOST_COLUMNS_NEAR; }

// The outputs `at` to `end` of many rows. Not inlined: beside it, sums of fewer rows are not all kept in registers.
FAST static __attribute__((noinline)) void multiply_many_rows(const Product *p, Py_ssize_t at, Py_ssize_t end) {
    const Py_ssize_t passes = (p->rows + MANY_ROWS - 1) / MANY_ROWS;
    for (Py_ssize_t pass = 0; pass < passes; pass++) {
        const Py_ssize_t first = p->rows * pass / passes;
        const Product some = rows_of(p, first, p->rows * (pass + 1) / passes - first);
        if (p->is_gated) multiply_many_blocks(&some, at, end, 2);
        else multiply_many_blocks(&some, at, end, 1);
    }
}
