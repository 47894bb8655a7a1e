// SPDX-License-Identifier: Apache-2.0
// Rotary embedding of few rows in bfloat16. Between large products what it costs is the calls, and torch needs three.

#include "native.h"

#if HAS_KERNELS

// x * cos + (x with its halves swapped) * sin; the sines of the first half have their sign turned.
FAST static void rotate_head(const uint16_t *x, const float *cos, const float *sin, uint16_t *y, Py_ssize_t size) {
    const Py_ssize_t half = size / 2;
    for (Py_ssize_t i = 0; i < half; i++) {
        const float low = widened(x[i]), high = widened(x[i + half]);
        y[i] = rounded(low * cos[i] + high * sin[i]);
        y[i + half] = rounded(high * cos[i + half] + low * sin[i + half]);
    }
}

const char *rotate(const Py_ssize_t *n) {
    const uint16_t *x = (const uint16_t *)n[0];
    const float *cos = (const float *)n[1], *sin = (const float *)n[2];
    uint16_t *y = (uint16_t *)n[3];
    const Py_ssize_t rows = n[4], heads = n[5], size = n[6], next_row = n[7], next_table = n[8];
    for (Py_ssize_t row = 0; row < rows; row++)
        for (Py_ssize_t head = 0; head < heads; head++, y += size)
            rotate_head(x + row * next_row + head * size, cos + row * next_table, sin + row * next_table, y, size);
    return NULL;
}

#endif
