// SPDX-License-Identifier: Apache-2.0
// Heads of few tokens, each with a matrix of its own: y = x weight^T, or x weight if it is transposed. Each token is multiplied by itself.

#include "product.h"

enum {
    TURNED_VECTORS = REGISTERS / 2,           // of outputs at a time, whose sums stay in registers
    TURNED = TURNED_VECTORS * FLOATS,
    ROWS_AHEAD = AHEAD / (2 * TURNED) > 0 ? AHEAD / (2 * TURNED) : 1,
};

// The outputs `at` to `end` of all heads in a row.
static void outputs_of_heads(const void *given, Py_ssize_t at, Py_ssize_t end) {
    const struct multiply_heads *n = given;
    while (at < end) {
        const Py_ssize_t head = at / n->outputs, from = at % n->outputs, left = n->outputs - from, count = left < end - at ? left : end - at;
        for (Py_ssize_t token = 0; token < n->tokens; token++) {
            const Py_ssize_t row = token * n->heads + head;
            const Product product = {
                .weight = (const uint16_t *)n->weight + head * n->outputs * n->columns, .x = (const uint16_t *)n->x + row * n->columns,
                .y = (uint16_t *)n->y + row * n->outputs, .rows = 1, .columns = n->columns, .outputs = n->outputs,
                .activation = NOTHING,
            };
            product_outputs(&product, from, from + count);
        }
        at += count;
    }
}

// TURNED outputs, or the first `count` of them: rows of the matrix, `step` apart, times the elements of x.
FAST INLINE void add_rows(const uint16_t *matrix, Py_ssize_t step, const uint16_t *x, Py_ssize_t columns, uint16_t *y, const bool is_whole, Py_ssize_t count) {
    Floats sums[TURNED_VECTORS];
#pragma GCC unroll 16
    for (int j = 0; j < TURNED_VECTORS; j++) sums[j] = all(0.0f);
    for (Py_ssize_t i = 0; i < columns; i++, matrix += step) {
        const Floats value = all(widened(x[i]));
#pragma GCC unroll 16
        for (int j = 0; j < TURNED_VECTORS; j++) {
            const Py_ssize_t left = is_whole ? FLOATS : count - j * FLOATS;
            if (left <= 0) break;
            fetch(matrix + ROWS_AHEAD * step + j * FLOATS);
            sums[j] = fused(value, widened_vector(matrix + j * FLOATS, first_lanes(left)), sums[j]);
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < TURNED_VECTORS; j++)
        if (is_whole || j * FLOATS < count) store_rounded(y + j * FLOATS, first_lanes(is_whole ? FLOATS : count - j * FLOATS), sums[j]);
}

// The parts `at` to `end` of all heads in a row, each of TURNED outputs.
FAST static void transposed_parts(const void *given, Py_ssize_t at, Py_ssize_t end) {
    const struct multiply_heads *n = given;
    const Py_ssize_t parts = (n->outputs + TURNED - 1) / TURNED;
    for (; at < end; at++) {
        const Py_ssize_t head = at / parts, from = at % parts * TURNED, count = n->outputs - from;
        const uint16_t *matrix = (const uint16_t *)n->weight + head * n->outputs * n->columns + from;
        for (Py_ssize_t token = 0; token < n->tokens; token++) {
            const Py_ssize_t row = token * n->heads + head;
            const uint16_t *x = (const uint16_t *)n->x + row * n->columns;
            uint16_t *y = (uint16_t *)n->y + row * n->outputs + from;
            if (count >= TURNED)
                add_rows(matrix, n->outputs, x, n->columns, y, true, 0);
            else
                add_rows(matrix, n->outputs, x, n->columns, y, false, count);
        }
    }
}

static const char *multiply_heads(const struct multiply_heads *n) {
    const Py_ssize_t parts = (n->outputs + TURNED - 1) / TURNED;
    const unsigned threads = n->heads * n->outputs * n->columns < SMALL_WEIGHT ? 1 : (unsigned)n->threads;
    if (n->is_transposed)
        in_shares(transposed_parts, n, n->heads * parts, 1, threads);
    else
        share_outputs(outputs_of_heads, n, n->heads * n->outputs, n->columns, n->threads);
    return NULL;
}
