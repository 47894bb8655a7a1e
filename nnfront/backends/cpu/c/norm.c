// SPDX-License-Identifier: Apache-2.0
// Norms of few rows in bfloat16: between large products what they cost is the calls, and torch needs three.

#include <math.h>

#include "native.h"

#if HAS_KERNELS

enum {
    FLOATS = 16,     // in a vector
    SUMS = 4,        // vectors at a time, as one sum alone waits for itself
    SMALL = 1 << 14, // elements that take less time than waking threads
};

// FLOATS weights, which are float if `is_wide`, zero where `there` marks none.
FAST INLINE __m512 weights(const void *from, bool is_wide, Py_ssize_t at, __mmask16 there) {
    return is_wide ? _mm512_maskz_loadu_ps(there, (const float *)from + at) : widened_vector((const uint16_t *)from + at, there);
}

// The sum of x - mean, or of its squares.
FAST INLINE double sum_of(const uint16_t *x, Py_ssize_t size, float mean, const bool is_squared) {
    __m512 sums[SUMS];
    for (int i = 0; i < SUMS; i++) sums[i] = _mm512_setzero_ps();
    for (Py_ssize_t at = 0; at < size; at += FLOATS) {
        const __mmask16 there = first_lanes(size - at);
        const __m512 value = _mm512_maskz_sub_ps(there, widened_vector(x + at, there), _mm512_set1_ps(mean));
        __m512 *sum = sums + at / FLOATS % SUMS;
        *sum = is_squared ? _mm512_fmadd_ps(value, value, *sum) : _mm512_add_ps(*sum, value);
    }
    double sum = 0.0;
    for (int i = 0; i < SUMS; i++) {
        float parts[FLOATS];
        _mm512_storeu_ps(parts, sums[i]);
        for (int j = 0; j < FLOATS; j++) sum += parts[j];
    }
    return sum;
}

FAST static void normalize(const struct norm *n, const uint16_t *x, const uint16_t *added, uint16_t *total, uint16_t *y) {
    const Py_ssize_t size = n->size;
    const bool is_wide = n->is_wide != 0;
    if (added) {
        for (Py_ssize_t i = 0; i < size; i += FLOATS) {
            const __mmask16 there = first_lanes(size - i);
            const __m512 sum = _mm512_add_ps(widened_vector(x + i, there), widened_vector(added + i, there));
            _mm256_mask_storeu_epi16(total + i, there, rounded_vector(sum));
        }
        x = total;
    }
    const float mean = n->is_centered ? (float)(sum_of(x, size, 0.0f, false) / (double)size) : 0.0f;
    const float factor = (float)(1.0 / sqrt(sum_of(x, size, mean, true) / (double)size + n->epsilon));
    for (Py_ssize_t i = 0; i < size; i += FLOATS) {
        const __mmask16 there = first_lanes(size - i);
        __m512 value = _mm512_mul_ps(_mm512_sub_ps(widened_vector(x + i, there), _mm512_set1_ps(mean)), _mm512_set1_ps(factor));
        if (n->weight) value = _mm512_mul_ps(value, weights(n->weight, is_wide, i, there));
        if (n->bias) value = _mm512_add_ps(value, weights(n->bias, is_wide, i, there));
        _mm256_mask_storeu_epi16(y + i, there, rounded_vector(value));
    }
}

FAST static void normalize_rows(const void *given, Py_ssize_t first, Py_ssize_t end) {
    const struct norm *n = given;
    const uint16_t *x = n->x, *added = n->added;
    uint16_t *total = n->total, *y = n->y;
    for (Py_ssize_t at = first * n->size; at < end * n->size; at += n->size)
        normalize(n, x + at, added ? added + at : NULL, added ? total + at : NULL, y + at);
}

const char *norm(const struct norm *n) {
    in_shares(normalize_rows, n, n->rows, 1, n->rows * n->size < SMALL ? 1 : (unsigned)n->threads);
    return NULL;
}

#endif
