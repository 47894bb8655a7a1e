// SPDX-License-Identifier: Apache-2.0
// Products of rows with a weight that is stored in 8 or 4 bits, fast for few rows.
//
// As with bfloat16 (products.c), reading the weight is what takes time. Quantised values are decoded in registers, a step at a time, as the instruction set does
// it best (`quantized_values_bf16.h`, `quantized_values_float.h`), and multiplied with all rows of x; sums are scaled, not quantised values. Of several rows tiles
// (`quantized_tiles.c`) decode each quantised value once for all of them.

#include <stdlib.h>

#if AVX512_BF16
#include "quantized_values_bf16.h"
#else
#include "quantized_values_float.h"
#endif
#include "dequantize.c"
#include "product.h"

INLINE int bytes_in_step(const Stored how) { return in_blocks(how) ? block_bytes(how) : step_bytes(how); }

INLINE int elements_in_step(const Stored how) { return in_blocks(how) ? (int)BLOCK_ELEMENTS : step_elements(how); }

enum {
    PAGE = 4 << 10,         // bytes of x
    ALIGNED = 64,
};

// Add to the sums of an output, for all rows of x, what its steps from `first` on contribute; `how` and `rows` are constants wherever this is inlined.
FAST INLINE void quantized_tile(const Quantized *p, const Constants *c, const Stored how, Py_ssize_t at, Sums to, const int slot, Py_ssize_t first,
                            const int rows) {
    const Py_ssize_t steps = (p->bytes + bytes_in_step(how) - 1) / bytes_in_step(how), end = first + p->turn < steps ? first + p->turn : steps;
    Floats sums[ROWS_AT_ONCE];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) sums[row] = first ? to[row][slot] : all(0.0f);
    if (!first && has_offset(how) && !in_blocks(how)) add_group_sums(p, how, sums, at, offset_of(p, how), rows);
    if (in_blocks(how)) add_blocks(p, how, sums, at, first, end, rows);
    else add_steps(p, c, how, sums, at, first, end, rows);
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) to[row][slot] = sums[row];
}

// Write `count` outputs from `at`.
FAST INLINE void finish(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t count, Sums sums) {
    for (Py_ssize_t row = 0; row < p->rows; row++) {
        float of_row[OUTPUTS_TOGETHER];
        store_totals(of_row, sums[row], OUTPUTS_TOGETHER);
        for (int i = 0; i < count; i += FLOATS) {
            const Lanes there = first_lanes(count - i);
            const Py_ssize_t to = row * p->outputs + at + i;
            const Floats scales = is_grouped(how) ? all(1.0f) : scales_there(p->scales, p->kind, at + i, there);
            Floats y = fused(floats(of_row + i), scales, p->bias ? widened_vector(p->bias + at + i, there) : all(0.0f));
            if (p->added) y += widened_vector(p->added + to, there);
            store_rounded(p->y + to, there, y);
        }
    }
}

FAST INLINE void quantized_outputs(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t end) {
    const Constants c = constants(p, how);
    Sums sums = {0};
    for (; at < end; at += OUTPUTS_TOGETHER) {
        const int count = end - at < OUTPUTS_TOGETHER ? (int)(end - at) : OUTPUTS_TOGETHER;
        for (Py_ssize_t first = 0; first * bytes_in_step(how) < p->bytes; first += p->turn) {
            for (int i = 0; i < count; i++) {
                if (in_blocks(how) && !p->is_arranged) {
                    sum_blocks(p, how, at + i, sums, i);
                    continue;
                }
                if (!in_blocks(how) && makes_sums(p, how, at + i, sums, i)) continue;
#define ROWS(rows) case rows: quantized_tile(p, &c, how, at + i, sums, i, first, rows); break;
                switch (p->rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
#undef ROWS
            }
        }
        finish(p, how, at, count, sums);
    }
}

#define OUTPUTS(how) \
    FAST static void quantized_outputs_##how(const void *product, Py_ssize_t at, Py_ssize_t end) { quantized_outputs(product, how, at, end); }
OUTPUTS(INT8) OUTPUTS(INT8_GROUPS) OUTPUTS(FLOAT8) OUTPUTS(FLOAT8_GROUPS) OUTPUTS(INT4_GROUPS) OUTPUTS(UINT4_GROUPS) OUTPUTS(VALUES4)
OUTPUTS(Q4_K) OUTPUTS(Q5_K) OUTPUTS(Q6_K)
#undef OUTPUTS

static const Share quantized_shares[] = {quantized_outputs_INT8, quantized_outputs_INT8_GROUPS, quantized_outputs_FLOAT8, quantized_outputs_FLOAT8_GROUPS, quantized_outputs_INT4_GROUPS,
                                     quantized_outputs_UINT4_GROUPS, quantized_outputs_VALUES4, quantized_outputs_Q4_K, quantized_outputs_Q5_K, quantized_outputs_Q6_K};

static const char *multiply_quantized(const struct multiply_quantized *n) {
    const Stored how = (Stored)n->stored;
    const Py_ssize_t columns = n->columns, outputs = n->outputs;
    const char *why = unlike(how, n->stored, columns, n->groups, n->scale_kind);
    if (why) return why;
    if (n->with_tiles && takes_tiles(n)) return multiply_quantized_by_tiles(n);
    const Py_ssize_t bytes = bytes_of(how, columns), steps = (bytes + bytes_in_step(how) - 1) / bytes_in_step(how);
    // Rows whose addresses differ by multiples of a page would share few places of the nearest cache.
    const Py_ssize_t padded = steps * elements_in_step(how), size = (Py_ssize_t)sizeof(Element), page = PAGE / size;
    const Py_ssize_t stride = ROWS_AT_ONCE * padded * size <= NEAR_ARRANGED ? padded : (padded + page - 1) / page * page + page / ROWS_AT_ONCE;
    const bool is_offset = has_offset(how) && !in_blocks(how);
    const Py_ssize_t next_sums = is_offset ? n->groups + FLOATS : 0;
    void *memory = malloc((size_t)(ROWS_AT_ONCE * (stride * size + next_sums * (Py_ssize_t)sizeof(float)) + ALIGNED));
    if (!memory) return no_memory;
    Element *x = (Element *)(((uintptr_t)memory + ALIGNED - 1) / ALIGNED * ALIGNED);
    Quantized p = WEIGHT_OF(n, outputs);
    float *sums = (float *)(x + ROWS_AT_ONCE * stride);
    p.x = x, p.stride = stride, p.sums = sums, p.next_sums = next_sums, p.bias = n->bias;
    // From the second turn on the weight is read again, which takes less time than multiplying so many rows does.
    for (Py_ssize_t row = 0; row < n->rows; row += p.rows) {
        p.rows = n->rows - row < ROWS_AT_ONCE ? n->rows - row : ROWS_AT_ONCE;
        p.y = (uint16_t *)n->y + row * outputs;
        p.added = n->added ? (const uint16_t *)n->added + row * outputs : NULL;
        // Outputs lie one after the other, which is the order that memory likes best, unless x is larger than the nearest cache.
        const Py_ssize_t turns = (p.rows * padded * size + NEAR_ARRANGED - 1) / NEAR_ARRANGED;
        p.turn = turns > 1 ? (steps + turns - 1) / turns : steps;
        p.ahead = turns > 1 ? (BYTES_AHEAD / bytes_in_step(how) / p.turn + 1) * p.bytes : BYTES_AHEAD;
        p.plain = (const uint16_t *)n->x + row * columns, p.is_arranged = !(is_offset || in_blocks(how)) || are_usual(p.plain, p.rows * columns);
        for (Py_ssize_t i = 0; i < p.rows; i++) {
            const uint16_t *row_of_x = p.plain + i * columns;
            if (in_blocks(how)) arrange_blocks(row_of_x, x + i * stride, columns, how);
            else arrange(row_of_x, x + i * stride, columns, steps, how);
            if (is_offset) sum_groups(row_of_x, sums + i * next_sums, n->groups, p.shift);
        }
        const Py_ssize_t least = (QUANTIZED_SHARE / (bytes + 1) / OUTPUTS_TOGETHER + 1) * OUTPUTS_TOGETHER;
        in_shares(quantized_shares[how], &p, outputs, least, outputs * bytes < SMALL_QUANTIZED ? 1 : (unsigned)n->threads);
    }
    free(memory);
    return NULL;
}

static const char *multiply_dequantized(const struct multiply_dequantized *n) {
    const char *why = unlike((Stored)n->stored, n->stored, n->columns, n->groups, n->scale_kind);
    if (why) return why;
    if (!n->together) return refused("rows to multiply together, got 0");
    if (has_tiles()) {
        multiply_dequantized_by_tiles(n);
        return NULL;
    }
    const struct multiply_quantized same = {
        .stored = n->stored, .rows = n->rows, .columns = n->columns, .outputs = n->outputs, .groups = n->groups, .scale_kind = n->scale_kind, .values0 = n->values0,
        .values1 = n->values1, .values2 = n->values2, .values3 = n->values3, .threads = n->threads, .unit = n->unit, .quantized = n->quantized, .scales = n->scales,
        .zeros = n->zeros, .x = n->x, .bias = n->bias, .y = n->y,
    };
    return multiply_quantized(&same);
}
