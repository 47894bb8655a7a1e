// SPDX-License-Identifier: Apache-2.0
// What routers do with a score for each expert: softmax, sums, the largest and their places. Rows are short, so one thread does it.

#include <math.h>

#include "kinds.h"

// In the order of REDUCTIONS in rows.py.
typedef enum { SOFTMAX, SUM, ANY } Reduction;

static const char *reduce(const struct reduce *n) {
    if (n->operation > ANY || n->x_kind > BOOL || n->y_kind > BOOL) return refused("an operation and kinds that there are");
    for (Py_ssize_t row = 0; row < n->outer * n->inner; row++) {
        const Py_ssize_t first = row / n->inner * n->size * n->inner + row % n->inner;
        float most = -INFINITY;
        double sum = 0.0;
        for (Py_ssize_t i = 0; i < n->size; i++) {
            const float x = value_at(n->x, n->x_kind, first + i * n->inner);
            most = x > most ? x : most;
            sum += n->operation == ANY ? x != 0.0f : x;
        }
        if (n->operation != SOFTMAX) {
            put_value(n->y, n->y_kind, row, (float)sum);
            continue;
        }
        sum = 0.0;
        for (Py_ssize_t i = 0; i < n->size; i++) sum += expf(value_at(n->x, n->x_kind, first + i * n->inner) - most);
        for (Py_ssize_t i = 0; i < n->size; i++) {
            const Py_ssize_t at = first + i * n->inner;
            put_value(n->y, n->y_kind, at, (float)(expf(value_at(n->x, n->x_kind, at) - most) / sum));
        }
    }
    return NULL;
}

// Whether x is before y: a NaN is before all numbers, of equals the first one is.
INLINE bool is_before(float x, float y) { return x > y || (x != x && y == y); }

// The k-th is the first of those that come after the one before it.
static const char *largest(const struct largest *n) {
    if (n->kind > FLOAT32 || n->k > n->size) return refused("at most as many of them as there are, in a kind that there is");
    for (Py_ssize_t row = 0; row < n->rows; row++) {
        Py_ssize_t before = -1;
        float bound = 0.0f;
        for (Py_ssize_t i = 0; i < n->k; i++) {
            Py_ssize_t best = -1;
            float found = 0.0f;
            for (Py_ssize_t j = 0; j < n->size; j++) {
                const float x = value_at(n->x, n->kind, row * n->size + j);
                const bool is_later = before < 0 || is_before(bound, x) || (!is_before(x, bound) && j > before);
                if (is_later && (best < 0 || is_before(x, found))) best = j, found = x;
            }
            if (n->values) put_value(n->values, n->kind, row * n->k + i, found);
            if (n->indices) ((int32_t *)n->indices)[row * n->k + i] = (int32_t)best;
            before = best, bound = found;
        }
    }
    return NULL;
}

static const char *gather_elements(const struct gather_elements *n) {
    if (n->kind > BOOL) return refused("a kind that there is");
    for (Py_ssize_t at = 0; at < n->rows * n->k; at++) {
        const Py_ssize_t index = ((const int32_t *)n->indices)[at];
        if (index < 0 || index >= n->size) return refused("an index from 0 to %zd, got %zd", n->size - 1, index);
        put_value(n->y, n->kind, at, value_at(n->x, n->kind, at / n->k * n->size + index));
    }
    return NULL;
}
