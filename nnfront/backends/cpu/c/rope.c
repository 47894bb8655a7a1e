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

const char *rotate(const struct rotate *n) {
    const uint16_t *x = n->x;
    const float *cos = n->cos, *sin = n->sin;
    uint16_t *y = n->y;
    for (Py_ssize_t row = 0; row < n->rows; row++)
        for (Py_ssize_t head = 0; head < n->heads; head++, y += n->size)
            rotate_head(x + row * n->next_row + head * n->size, cos + row * n->next_table, sin + row * n->next_table, y, n->size);
    return NULL;
}

#endif
