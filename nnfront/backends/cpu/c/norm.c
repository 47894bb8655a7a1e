// SPDX-License-Identifier: Apache-2.0
// Root-mean-square normalisation of few rows in bfloat16: between large products what it costs is the calls, and torch needs three.

#include <math.h>

#include "native.h"

#if HAS_KERNELS

enum { SUMS = 64 };  // at a time, as one alone waits for itself

// y = x * weight / root of the mean of x^2; x + added in the place of x if something is added, and that rounded to `total`.
FAST static void normalize(const uint16_t *x, const uint16_t *added, uint16_t *total, const uint16_t *weight, uint16_t *y, Py_ssize_t size,
                           float epsilon) {
    Py_ssize_t i = 0;
    if (added) {
        for (; i < size; i++) total[i] = rounded(widened(x[i]) + widened(added[i]));
        x = total, i = 0;
    }
    float squares[SUMS] = {0};
    for (; i + SUMS <= size; i += SUMS)
        for (int j = 0; j < SUMS; j++) squares[j] += widened(x[i + j]) * widened(x[i + j]);
    for (; i < size; i++) squares[0] += widened(x[i]) * widened(x[i]);
    double sum = 0.0;
    for (int j = 0; j < SUMS; j++) sum += squares[j];
    const float factor = (float)(1.0 / sqrt(sum / (double)size + epsilon));
    for (i = 0; i < size; i++) y[i] = rounded(widened(x[i]) * factor * widened(weight[i]));
}

const char *rms_norm(const struct rms_norm *n) {
    const uint16_t *x = n->x, *added = n->added;
    uint16_t *total = n->total, *y = n->y;
    for (Py_ssize_t at = 0; at < n->rows * n->size; at += n->size)
        normalize(x + at, added ? added + at : NULL, added ? total + at : NULL, n->weight, y + at, n->size, (float)n->epsilon);
    return NULL;
}

#endif
