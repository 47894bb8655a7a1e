// SPDX-License-Identifier: Apache-2.0
// Products of many rows with a bfloat16 weight where no instruction multiplies bfloat16: to widen two values takes as many instructions as to multiply them.
//
// So a few rows of x are widened once for a block of outputs, which the second cache holds while one part of the rows after the other is multiplied with it; sums of
// longer rows are kept from some of their columns to the next. The order of sums is that of `products.c`.

#include "product.h"

enum {
    FEW_NOT_WIDENED = 16,  // rows that are multiplied faster as they are
    MANY_SHARE = 16,  // outputs that a thread takes at least
    PART_ROWS = 5,  // of x, whose sums with PART_OUTPUTS stay in registers
    PART_OUTPUTS = REGISTERS / 8,
    PART_SUMS = (PART_ROWS * PART_OUTPUTS + 15) / 16 * 16,  // with room for `store_totals`
    NEAR_OUTPUTS = 64,
    NEAR_SUMS = NEAR_OUTPUTS / PART_OUTPUTS + PART_OUTPUTS,  // of a part, with outputs that are left
    NEAR_PARTS = 16,  // of rows, whose sums are kept
    NEAR_COLUMNS = 1 << 10,  // of widened rows, which the nearest cache holds beside a row of the weight
};

// Outputs from `at` on, of the gates as many.
typedef struct {
    const Product *product;
    Py_ssize_t at, count;
} WidenedBlock;

// Some columns of a few rows of x, LANES of each row after one another, the even ones before the odd ones; zeros are behind the last.
typedef struct {
    float factors[PART_ROWS * NEAR_COLUMNS] __attribute__((aligned(64)));
    Py_ssize_t row, first, end;
} Widened;

typedef float Results[2][PART_ROWS][NEAR_OUTPUTS + FLOATS];  // of each half

// LANES values, or the first `count` of them.
FAST INLINE Bits pairs_at(const uint16_t *from, Py_ssize_t count) { return (Bits)(count < LANES ? first_words(from, count) : words(from)); }

FAST INLINE void widen_rows(Widened *to, const Product *p, const int rows) {
    float *factors = to->factors;
    for (Py_ssize_t at = to->first; at < to->end; at += LANES)
#pragma GCC unroll 5
        for (int row = 0; row < rows; row++, factors += LANES) {
            const Bits both = pairs_at(p->x + (to->row + row) * p->columns + at, to->end - at);
            store(factors, (Floats)(both << 16)), store(factors + FLOATS, (Floats)(both & 0xFFFF0000));
        }
}

// Add to `sums`, [row, output], what LANES columns of each of `outputs` rows of the weight contribute, or the first `count` of them.
FAST INLINE void add_widened(Floats *sums, const float *factors, const uint16_t *const *weight, Py_ssize_t at, Py_ssize_t count, const int rows, const int outputs) {
#pragma GCC unroll 2
    for (int is_odd = 0; is_odd < 2; is_odd++) {
        Floats of[PART_OUTPUTS];
#pragma GCC unroll 4
        for (int i = 0; i < outputs; i++) of[i] = (Floats)(is_odd ? pairs_at(weight[i] + at, count) & 0xFFFF0000 : pairs_at(weight[i] + at, count) << 16);
#pragma GCC unroll 5
        for (int row = 0; row < rows; row++) {
            const Floats factor = loaded(factors + row * LANES + is_odd * FLOATS);
#pragma GCC unroll 4
            for (int i = 0; i < outputs; i++) add_product(&sums[row * outputs + i], of[i], factor);
        }
    }
}

// Sums of `rows` rows and of `outputs` outputs, output `i` of a block and what follows, gates beside their other halves: added to those `kept` until now, and where columns end among results.
FAST INLINE void multiply_widened(const WidenedBlock *some, const Widened *x, Py_ssize_t i, Floats *kept, Results results, const int rows, const int outputs, const int halves) {
    const Product *p = some->product;
    const int each = outputs / halves;
    const Py_ssize_t whole = x->first + (x->end - x->first) / LANES * LANES;
    const uint16_t *weight[PART_OUTPUTS];
    Floats sums[PART_SUMS];
    float totals[PART_SUMS];
    for (int j = 0; j < outputs; j++) weight[j] = p->weight + (some->at + i + j % each + j / each * p->outputs) * p->columns;
#pragma GCC unroll 20
    for (int j = 0; j < rows * outputs; j++) sums[j] = x->first ? kept[j] : all(0.0f);
    for (Py_ssize_t at = x->first; at < whole; at += LANES) add_widened(sums, x->factors + (at - x->first) * rows, weight, at, LANES, rows, outputs);
    if (whole < x->end) add_widened(sums, x->factors + (whole - x->first) * rows, weight, whole, x->end - whole, rows, outputs);
    if (x->end < p->columns) {
#pragma GCC unroll 20
        for (int j = 0; j < rows * outputs; j++) kept[j] = sums[j];
        return;
    }
    store_totals(totals, sums, rows * outputs);
    for (int j = 0; j < rows * outputs; j++) results[j % outputs / each][j / outputs][i + j % each] = totals[j];
}

// Some columns of a part of the rows, while those of the next rows are fetched.
FAST INLINE void multiply_widened_part(const WidenedBlock *some, Widened *x, Floats (*kept)[PART_ROWS * PART_OUTPUTS], const int rows, const int halves) {
    const Product *p = some->product;
    const uint16_t *next = p->x + (x->row + rows) * p->columns + x->first;
    Results results;
    Py_ssize_t i = 0;
    widen_rows(x, p, rows);
    for (; i + PART_OUTPUTS / halves <= some->count; i += PART_OUTPUTS / halves, next += LINE / 2) {
        for (int row = 0; row < PART_ROWS; row++) __builtin_prefetch(next + row * p->columns, 0, 2);
        multiply_widened(some, x, i, *kept++, results, rows, PART_OUTPUTS, halves);
    }
    for (; i < some->count; i++) multiply_widened(some, x, i, *kept++, results, rows, halves, halves);
    for (int row = 0; row < rows && x->end == p->columns; row++) finish_row(p, x->row + row, some->at, some->count, results[0][row], results[1][row], halves);
}

FAST INLINE void multiply_widened_block(const WidenedBlock *some, const int halves) {
    const Product *p = some->product;
    const Py_ssize_t parts = (p->rows + PART_ROWS - 1) / PART_ROWS;
    Floats kept[NEAR_PARTS][NEAR_SUMS][PART_ROWS * PART_OUTPUTS];
    Widened x;
    for (Py_ssize_t from = 0; from < parts; from += NEAR_PARTS) {
        x.end = 0;
        do {
            x.first = x.end, x.end = least(x.first + NEAR_COLUMNS, p->columns);
            for (Py_ssize_t part = from; part < least(from + NEAR_PARTS, parts); part++) {
                x.row = p->rows * part / parts;
                // So many rows are parts of PART_ROWS or of one less.
                if (p->rows * (part + 1) / parts - x.row < PART_ROWS) multiply_widened_part(some, &x, kept[part - from], PART_ROWS - 1, halves);
                else multiply_widened_part(some, &x, kept[part - from], PART_ROWS, halves);
            }
        } while (x.end < p->columns);
    }
}

// Whether there are so many rows that widening them pays.
INLINE bool are_many(const Product *p) { return p->rows > FEW_NOT_WIDENED; }

// The outputs `at` to `end` of many rows.
FAST static void multiply_many_rows(const Product *p, Py_ssize_t at, Py_ssize_t end) {
    for (const Py_ssize_t halves = p->is_gated ? 2 : 1; at < end; at += NEAR_OUTPUTS / halves) {
        const WidenedBlock some = {.product = p, .at = at, .count = least(end - at, NEAR_OUTPUTS / halves)};
        if (halves > 1) multiply_widened_block(&some, 2);
        else multiply_widened_block(&some, 1);
    }
}
