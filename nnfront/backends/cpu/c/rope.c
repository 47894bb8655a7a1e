// SPDX-License-Identifier: Apache-2.0
// Rotary embedding of few rows in bfloat16. Between large products what it costs is the calls, and torch needs three.

#include "words.h"

enum { SMALL_ROPE = 1 << 14 };  // elements that take less time than waking threads

// Turn the pairs of the first `rotated` features, which lie `apart`, by tables in which the sine of the first of a pair has its sign turned.
// Pairs begin at the first `apart` features of each 2 * apart.
FAST INLINE void rotate_head(const uint16_t *x, const float *cos, const float *sin, uint16_t *y, Py_ssize_t rotated, Py_ssize_t apart) {
    for (Py_ssize_t first = 0; first < rotated; first += 2 * apart)
        for (Py_ssize_t i = first; i < first + apart; i++) {
            const float low = widened(x[i]), high = widened(x[i + apart]);
            y[i] = rounded(low * cos[i] + high * sin[i]);
            y[i + apart] = rounded(high * cos[i + apart] + low * sin[i + apart]);
        }
}

FAST static void rotate_rows(const void *given, Py_ssize_t first, Py_ssize_t end) {
    const struct rotate *n = given;
    const Py_ssize_t size = n->size, rotated = n->rotated;
    uint16_t *y = (uint16_t *)n->y + first * n->heads * size;
    for (Py_ssize_t row = first; row < end; row++) {
        const float *cos = (const float *)n->cos + row * n->next_table, *sin = (const float *)n->sin + row * n->next_table;
        for (Py_ssize_t head = 0; head < n->heads; head++, y += size) {
            const uint16_t *x = (const uint16_t *)n->x + row * n->next_row + head * size;
            if (n->is_interleaved)
                rotate_head(x, cos, sin, y, rotated, 1);
            else
                rotate_head(x, cos, sin, y, rotated, rotated / 2);
            memcpy(y + rotated, x + rotated, (size - rotated) * sizeof *y);
        }
    }
}

static const char *rotate(const struct rotate *n) {
    if (n->rotated > n->size || n->rotated % 2) return refused("an even number of up to %zd rotated features, got %zd", n->size, n->rotated);
    in_shares(rotate_rows, n, n->rows, 1, n->rows * n->heads * n->size < SMALL_ROPE ? 1 : (unsigned)n->threads);
    return NULL;
}
