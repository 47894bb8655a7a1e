// SPDX-License-Identifier: Apache-2.0
// Norms of few rows in bfloat16: between large products what they cost is the calls, and torch needs three.

#include <math.h>

#include "words.h"

enum {
    SUMS = 4,             // vectors at a time, as one sum alone waits for itself
    SMALL_NORM = 1 << 14, // elements that take less time than waking threads
};

// The sum of x - mean, or of its squares.
FAST INLINE double sum_of(const void *x, bool is_wide, Py_ssize_t size, float mean, const bool is_squared) {
    Floats sums[SUMS];
    for (int i = 0; i < SUMS; i++) sums[i] = all(0.0f);
    for (Py_ssize_t at = 0; at < size; at += FLOATS) {
        const Lanes there = first_lanes(size - at);
        const Floats value = only(there, elements(x, is_wide, at, there) - mean);
        Floats *sum = sums + at / FLOATS % SUMS;
        *sum = is_squared ? fused(value, value, *sum) : *sum + value;
    }
    double sum = 0.0;
    for (int i = 0; i < SUMS; i++) {
        float parts[FLOATS];
        store(parts, sums[i]);
        for (int j = 0; j < FLOATS; j++) sum += parts[j];
    }
    return sum;
}

FAST static void normalize(const struct norm *n, const void *x, const void *added, void *total, void *y) {
    const Py_ssize_t size = n->size;
    const bool is_wide = n->is_wide != 0, is_wide_x = n->is_wide_x != 0;
    if (added) {
        for (Py_ssize_t i = 0; i < size; i += FLOATS) {
            const Lanes there = first_lanes(size - i);
            store_elements(total, is_wide_x, i, there, elements(x, is_wide_x, i, there) + elements(added, is_wide_x, i, there));
        }
        x = total;
    }
    const float mean = n->is_centered ? (float)(sum_of(x, is_wide_x, size, 0.0f, false) / (double)size) : 0.0f;
    const float factor = (float)(1.0 / sqrt(sum_of(x, is_wide_x, size, mean, true) / (double)size + n->epsilon));
    for (Py_ssize_t i = 0; i < size; i += FLOATS) {
        const Lanes there = first_lanes(size - i);
        Floats value = (elements(x, is_wide_x, i, there) - mean) * factor;
        if (n->weight) value *= elements(n->weight, is_wide, i, there);
        if (n->bias) value += elements(n->bias, is_wide, i, there);
        store_elements(y, is_wide_x, i, there, value);
    }
}

FAST static void normalize_rows(const void *given, Py_ssize_t first, Py_ssize_t end) {
    const struct norm *n = given;
    const Py_ssize_t step = n->size * (n->is_wide_x ? 4 : 2);
    const char *x = n->x, *added = n->added;
    char *total = n->total, *y = n->y;
    for (Py_ssize_t at = first * step; at < end * step; at += step) normalize(n, x + at, added ? added + at : NULL, added ? total + at : NULL, y + at);
}

static const char *norm(const struct norm *n) {
    in_shares(normalize_rows, n, n->rows, 1, n->rows * n->size < SMALL_NORM ? 1 : (unsigned)n->threads);
    return NULL;
}
