// SPDX-License-Identifier: Apache-2.0
// Low-rank changes of a product for few rows: the matrices of each adapter that is there multiply the rows of its sequences at once.

#include "product.h"

// Rows of one adapter, by number.
static const char *add_adapter(const struct add_low_rank *n, Py_ssize_t adapter, const Py_ssize_t *found, Py_ssize_t rows) {
    const Py_ssize_t size = n->size, rank = n->rank, outputs = n->outputs;
    uint16_t *x = n->work, *hidden = x + rows * size, *before = hidden + rows * rank, *after = before + rows * outputs, *packed = after + rows * outputs, *y = n->y;
    for (Py_ssize_t i = 0; i < rows; i++) {
        memcpy(x + i * size, (const uint16_t *)n->x + found[i] * size, (size_t)size * sizeof *x);
        memcpy(before + i * outputs, y + found[i] * outputs, (size_t)outputs * sizeof *y);
    }
    const struct multiply first = {rows, size, rank, 0, NOTHING, n->with_tiles, n->threads, (const uint16_t *)n->first + adapter * rank * size, x, NULL, NULL, packed, hidden};
    const struct multiply second = {rows, rank, outputs, 0, NOTHING, n->with_tiles, n->threads, (const uint16_t *)n->second + adapter * outputs * rank, hidden, NULL, before, packed, after};
    const char *why = multiply(&first);
    if (!why) why = multiply(&second);
    for (Py_ssize_t i = 0; i < rows && !why; i++) memcpy(y + found[i] * outputs, after + i * outputs, (size_t)outputs * sizeof *y);
    return why;
}

static const char *add_low_rank(const struct add_low_rank *n) {
    const Py_ssize_t rows = n->sequences * n->tokens;
    if (rows > MOST_ROWS) return refused("up to %d rows, got %zd", MOST_ROWS, rows);
    memcpy(n->y, n->added, (size_t)(rows * n->outputs) * sizeof(uint16_t));
    const int32_t *chosen = n->chosen;
    for (Py_ssize_t adapter = -1;;) {
        Py_ssize_t next = n->count, found[MOST_ROWS], count = 0;
        for (Py_ssize_t i = 0; i < n->sequences; i++)
            if (chosen[i] > adapter && chosen[i] < next) next = chosen[i];
        if (next == n->count) return NULL;
        adapter = next;
        for (Py_ssize_t i = 0; i < rows; i++)
            if (chosen[i / n->tokens] == adapter) found[count++] = i;
        const char *why = count ? add_adapter(n, adapter, found, count) : NULL;
        if (why) return why;
    }
}
