// SPDX-License-Identifier: Apache-2.0
// Root-mean-square normalisation of few rows in bfloat16: between large products what it costs is the calls, and torch needs three.

#include <math.h>

#include "native.h"

#if HAS_KERNELS

enum { SUMS = 64 };  // at a time, as one alone waits for itself

FAST static void normalize(const uint16_t *x, const uint16_t *weight, uint16_t *y, Py_ssize_t size, float epsilon) {
    float squares[SUMS] = {0};
    Py_ssize_t i = 0;
    for (; i + SUMS <= size; i += SUMS)
        for (int j = 0; j < SUMS; j++) squares[j] += widened(x[i + j]) * widened(x[i + j]);
    for (; i < size; i++) squares[0] += widened(x[i]) * widened(x[i]);
    double sum = 0.0;
    for (int j = 0; j < SUMS; j++) sum += squares[j];
    const float factor = (float)(1.0 / sqrt(sum / (double)size + epsilon));
    for (i = 0; i < size; i++) y[i] = rounded(widened(x[i]) * factor * widened(weight[i]));
}

PyObject *rms_norm(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t n[5];
    float epsilon;
    if (!read_numbers_and_real("rms_norm", args, count, n, 5, &epsilon)) return NULL;
    const uint16_t *x = (const uint16_t *)n[0], *weight = (const uint16_t *)n[1];
    uint16_t *y = (uint16_t *)n[2];
    const Py_ssize_t rows = n[3], size = n[4];
    for (Py_ssize_t row = 0; row < rows; row++) normalize(x + row * size, weight, y + row * size, size, epsilon);
    Py_RETURN_NONE;
}

#endif
