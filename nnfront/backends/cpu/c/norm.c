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

// FLOATS elements, which are float if `is_wide`, zero where `there` marks none.
FAST INLINE __m512 elements(const void *from, bool is_wide, Py_ssize_t at, __mmask16 there) {
    return is_wide ? _mm512_maskz_loadu_ps(there, (const float *)from + at) : widened_vector((const uint16_t *)from + at, there);
}

// The sum of x - mean, or of its squares.
FAST INLINE double sum_of(const void *x, bool is_wide, Py_ssize_t size, float mean, const bool is_squared) {
    __m512 sums[SUMS];
    for (int i = 0; i < SUMS; i++) sums[i] = _mm512_setzero_ps();
    for (Py_ssize_t at = 0; at < size; at += FLOATS) {
        const __mmask16 there = first_lanes(size - at);
        const __m512 value = _mm512_maskz_sub_ps(there, elements(x, is_wide, at, there), _mm512_set1_ps(mean));
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

FAST INLINE void put(void *to, bool is_wide, Py_ssize_t at, __mmask16 there, __m512 values) {
    if (is_wide)
        _mm512_mask_storeu_ps((float *)to + at, there, values);
    else
        _mm256_mask_storeu_epi16((uint16_t *)to + at, there, rounded_vector(values));
}

FAST static void normalize(const struct norm *n, const void *x, const void *added, void *total, void *y) {
    const Py_ssize_t size = n->size;
    const bool is_wide = n->is_wide != 0, is_wide_x = n->is_wide_x != 0;
    if (added) {
        for (Py_ssize_t i = 0; i < size; i += FLOATS) {
            const __mmask16 there = first_lanes(size - i);
            put(total, is_wide_x, i, there, _mm512_add_ps(elements(x, is_wide_x, i, there), elements(added, is_wide_x, i, there)));
        }
        x = total;
    }
    const float mean = n->is_centered ? (float)(sum_of(x, is_wide_x, size, 0.0f, false) / (double)size) : 0.0f;
    const float factor = (float)(1.0 / sqrt(sum_of(x, is_wide_x, size, mean, true) / (double)size + n->epsilon));
    for (Py_ssize_t i = 0; i < size; i += FLOATS) {
        const __mmask16 there = first_lanes(size - i);
        __m512 value = _mm512_mul_ps(_mm512_sub_ps(elements(x, is_wide_x, i, there), _mm512_set1_ps(mean)), _mm512_set1_ps(factor));
        if (n->weight) value = _mm512_mul_ps(value, elements(n->weight, is_wide, i, there));
        if (n->bias) value = _mm512_add_ps(value, elements(n->bias, is_wide, i, there));
        put(y, is_wide_x, i, there, value);
    }
}

FAST static void normalize_rows(const void *given, Py_ssize_t first, Py_ssize_t end) {
    const struct norm *n = given;
    const Py_ssize_t step = n->size * (n->is_wide_x ? 4 : 2);
    const char *x = n->x, *added = n->added;
    char *total = n->total, *y = n->y;
    for (Py_ssize_t at = first * step; at < end * step; at += step) normalize(n, x + at, added ? added + at : NULL, added ? total + at : NULL, y + at);
}

const char *norm(const struct norm *n) {
    in_shares(normalize_rows, n, n->rows, 1, n->rows * n->size < SMALL ? 1 : (unsigned)n->threads);
    return NULL;
}

#endif
