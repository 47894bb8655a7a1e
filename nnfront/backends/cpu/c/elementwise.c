// SPDX-License-Identifier: Apache-2.0
// Sums, products and quotients between the kernels of a token: each is one rounding, as torch's, so that a sequence gives the same bits.

#include "native.h"

#if HAS_KERNELS

// In the order of OPERATIONS in tape_elementwise.py.
enum { ADD, MULTIPLY, DIVIDE };

enum {
    FLOATS = 16,     // in a vector
    SMALL = 1 << 14, // elements that take less time than waking threads
};

// FLOATS elements, zero where `there` marks none.
FAST INLINE __m512 elements(const void *from, bool is_wide, Py_ssize_t at, __mmask16 there) {
    return is_wide ? _mm512_maskz_loadu_ps(there, (const float *)from + at) : widened_vector((const uint16_t *)from + at, there);
}

FAST static void combine_share(const void *given, Py_ssize_t first, Py_ssize_t end) {
    const struct combine *n = given;
    const __m512 number = _mm512_set1_ps((float)n->number);
    for (Py_ssize_t at = first; at < end; at += FLOATS) {
        const __mmask16 there = first_lanes(end - at);
        const __m512 x = elements(n->x, n->is_wide_x != 0, at, there), other = n->other ? elements(n->other, n->is_wide_other != 0, at, there) : number;
        const __m512 y = n->operation == ADD        ? _mm512_add_ps(x, other)
                         : n->operation == MULTIPLY ? _mm512_mul_ps(x, other)
                                                    : _mm512_maskz_div_ps(there, x, other);
        if (n->is_wide)
            _mm512_mask_storeu_ps((float *)n->y + at, there, y);
        else
            _mm256_mask_storeu_epi16((uint16_t *)n->y + at, there, rounded_vector(y));
    }
}

const char *combine(const struct combine *n) {
    in_shares(combine_share, n, n->count, 1024, n->count < SMALL ? 1 : (unsigned)n->threads);
    return NULL;
}

#endif
