// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with a bfloat16 weight.
//
// Such a product takes as long as reading its weight. A kernel that widens bfloat16 to float32 first is slower than the memory; one
// instruction for 32 products is not. Each row of the weight is read once, in order, and multiplied with all rows of x meanwhile. Of several rows the
// arithmetic takes as long, unless the processor has tiles for it (`tiles.c`): of many, a few rows of the weight stay near for all rows of x.

#include <stdlib.h>

#include "activation.h"
#include "product.h"

#if HAS_KERNELS

enum {
    MOST_ROWS = 64,  // rows of x
    TOGETHER = 8,    // rows of x at a time
    MOST_WIDE = 4,   // rows of the weight at a time
    MOST_SUMS = 24,  // rows of x times rows of the weight, so that all stay in registers
    NEAR = 7 << 10,  // elements of x that the nearest cache holds beside what passes through it
    SMALL = 1 << 15, // elements of a weight that take less time than waking threads
    SHARE = 1 << 16, // elements of a weight that a thread takes at least
    FLOATS = 16,     // in a vector
    GATES = 1 << 10, // results of a half that a thread holds at a time
};

// activation(product) + what is added to it; or activation(product) * (x @ up.T + its bias), where up lies behind the product's weight
typedef struct {
    Product product;
    Activation activation;
} Activated;

// LANES values, or the first of them that `there` marks.
FAST INLINE __m512bh values(const uint16_t *from, const bool is_whole, __mmask32 there) {
    return (__m512bh)(is_whole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(there, from));
}

// Add to `sums` what LANES columns of `wide` rows of the weight and all rows of x contribute.
FAST INLINE void add(__m512 *sums, const uint16_t *weight, const uint16_t *x, Py_ssize_t columns, const int rows,
                     const int wide, const bool is_whole, __mmask32 there) {
    __m512bh some[MOST_WIDE];
#pragma GCC unroll 4
    for (int j = 0; j < wide; j++) some[j] = values(weight + j * columns, is_whole, there);
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        const __m512bh with = values(x + row * columns, is_whole, there);
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) sums[row * wide + j] = _mm512_dpbf16_ps(sums[row * wide + j], some[j], with);
    }
}

// `wide` outputs of all rows of x; `rows` and `wide` are constants wherever this is inlined.
FAST INLINE void tile(const Product *p, Py_ssize_t at, const int rows, const int wide) {
    const uint16_t *weight = p->weight + at * p->columns;
    const Py_ssize_t whole = p->columns / LANES * LANES;
    __m512 sums[MOST_SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * wide; i++) sums[i] = _mm512_setzero_ps();
    for (Py_ssize_t i = 0; i < whole; i += LANES) add(sums, weight + i, p->x + i, p->columns, rows, wide, true, 0);
    if (whole < p->columns) {
        const __mmask32 rest = ((__mmask32)1 << (p->columns - whole)) - 1;
        add(sums, weight + whole, p->x + whole, p->columns, rows, wide, false, rest);
    }
#pragma GCC unroll 4
    for (int j = 0; j < wide; j++) {
        const float bias = p->bias ? widened(p->bias[at + j]) : 0.0f;
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            const Py_ssize_t to = row * p->outputs + at + j;
            const float sum = _mm512_reduce_add_ps(sums[row * wide + j]) + bias + (p->added ? widened(p->added[to]) : 0.0f);
            if (p->is_wide)
                ((float *)p->y)[to] = sum;
            else
                ((uint16_t *)p->y)[to] = rounded(sum);
        }
    }
}

FAST static void few_rows(const Product *p, Py_ssize_t at, Py_ssize_t end) {
    // One row of the weight after the other is the order that memory likes best, as long as x is in the nearest cache.
    const bool is_near = p->rows * p->columns <= NEAR;
#define ROWS(rows, wide) \
    case rows: \
        for (; !is_near && at + wide <= end; at += wide) tile(p, at, rows, wide); \
        for (; at < end; at++) tile(p, at, rows, 1); \
        break;
    switch (p->rows) { ROWS(1, 4) ROWS(2, 4) ROWS(3, 4) ROWS(4, 4) ROWS(5, 4) ROWS(6, 4) ROWS(7, 3) ROWS(8, 3) }
#undef ROWS
}

FAST static void outputs(const void *product, Py_ssize_t at, Py_ssize_t end) {
    const Product *p = product;
    if (p->packed) {
        outputs_by_tiles(p, at, end);
        return;
    }
    const Py_ssize_t parts = (p->rows + TOGETHER - 1) / TOGETHER;
    const Py_ssize_t step = parts > 1 ? MOST_SUMS / TOGETHER : end - at;
    for (; at < end; at += step)
        for (Py_ssize_t part = 0; part < parts; part++) {
            const Py_ssize_t first = p->rows * part / parts, skipped = first * p->outputs;
            Product some = *p;
            some.rows = p->rows * (part + 1) / parts - first, some.x += first * p->columns;
            some.added += some.added ? skipped : 0, some.y = (char *)some.y + skipped * (p->is_wide ? 4 : 2);
            few_rows(&some, at, step < end - at ? at + step : end);
        }
}

// The parts `at` to `end` of `p` by themselves, in float.
static Product part(const Product *p, Py_ssize_t at, Py_ssize_t end, float *y) {
    Product part = *p;
    part.weight += at * p->columns, part.bias += p->bias ? at : 0;
    part.outputs = end - at, part.y = y, part.is_wide = true;
    return part;
}

FAST static void gate_values(const float *gates, const float *ups, uint16_t *y, Py_ssize_t count, Activation activation) {
    for (Py_ssize_t i = 0; i < count; i += FLOATS) {
        const __m512 product = _mm512_mul_ps(activated(_mm512_loadu_ps(gates + i), activation), _mm512_loadu_ps(ups + i));
        _mm256_mask_storeu_epi16(y + i, first_lanes(count - i), rounded_vector(product));
    }
}

FAST static void gated_outputs(const void *given, Py_ssize_t at, Py_ssize_t end) {
    const Activated *g = given;
    const Product *p = &g->product;
    const Py_ssize_t most = GATES / p->rows / FLOATS * FLOATS, up = p->outputs;
    float gates[GATES + FLOATS], ups[GATES + FLOATS];
    for (; at < end; at += most) {
        const Py_ssize_t count = most < end - at ? most : end - at;
        const Product first = part(p, at, at + count, gates), second = part(p, up + at, up + at + count, ups);
        outputs(&first, 0, count);
        outputs(&second, 0, count);
        for (Py_ssize_t row = 0; row < p->rows; row++)
            gate_values(gates + row * count, ups + row * count, (uint16_t *)p->y + row * p->outputs + at, count, g->activation);
    }
}

FAST static void activated_outputs(const void *given, Py_ssize_t at, Py_ssize_t end) {
    const Activated *g = given;
    const Product *p = &g->product;
    const Py_ssize_t most = GATES / p->rows / FLOATS * FLOATS;
    float values[GATES + FLOATS];
    for (; at < end; at += most) {
        const Py_ssize_t count = most < end - at ? most : end - at;
        Product some = part(p, at, at + count, values);
        some.added = NULL;
        outputs(&some, 0, count);
        for (Py_ssize_t row = 0; row < p->rows; row++)
            for (Py_ssize_t i = 0; i < count; i += FLOATS) {
                const Py_ssize_t to = row * p->outputs + at + i;
                const __mmask16 there = first_lanes(count - i);
                __m512 value = activated(_mm512_loadu_ps(values + row * count + i), g->activation);
                if (p->added) value = _mm512_add_ps(value, widened_vector(p->added + to, there));
                if (p->is_wide)
                    _mm512_mask_storeu_ps((float *)p->y + to, there, value);
                else
                    _mm256_mask_storeu_epi16((uint16_t *)p->y + to, there, rounded_vector(value));
            }
    }
}

// Let threads do their shares of a product, and what `work` does with it, whose product it is.
static const char *run(Share share, const void *work, Product *p, Py_ssize_t with_tiles, Py_ssize_t threads) {
    if (p->rows < 1 || p->rows > MOST_ROWS) return refused("1 to %d rows, got %zd", MOST_ROWS, p->rows);
    uint16_t *packed = NULL;
    if (with_tiles && p->rows > 1 && has_tiles()) {
        if (!(packed = packed_for_tiles(p))) return no_memory;
        p->packed = packed;
    }
    in_shares(share, work, p->outputs, SHARE / (p->columns + 1), p->outputs * p->columns < SMALL ? 1 : (unsigned)threads);
    free(packed);
    return NULL;
}

const char *multiply(const struct multiply *n) {
    Activated g = {
        .product = {
            .weight = n->weight, .x = n->x, .bias = n->bias, .added = n->added, .y = n->y, .rows = n->rows, .columns = n->columns,
            .outputs = n->outputs, .is_wide = n->is_wide != 0,
        },
        .activation = n->activation,
    };
    const bool is_plain = n->activation >= NOTHING;
    return run(is_plain ? outputs : activated_outputs, is_plain ? &g.product : (void *)&g, &g.product, n->with_tiles, n->threads);
}

const char *multiply_gated(const struct multiply_gated *n) {
    Activated g = {
        .product = {.weight = n->weight, .x = n->x, .bias = n->bias, .y = n->y, .rows = n->rows, .columns = n->columns, .outputs = n->outputs},
        .activation = n->activation,
    };
    return run(gated_outputs, &g, &g.product, n->with_tiles, n->threads);
}

FAST const char *gate(const struct gate *n) {
    const uint16_t *both = n->both;
    uint16_t *y = n->y;
    const Py_ssize_t size = n->size;
    for (Py_ssize_t row = 0; row < n->rows; row++, both += 2 * size, y += size)
        for (Py_ssize_t at = 0; at < size; at += GATES) {
            const Py_ssize_t count = GATES < size - at ? GATES : size - at;
            float gates[GATES + FLOATS], ups[GATES + FLOATS];
            for (Py_ssize_t i = 0; i < count; i++) gates[i] = widened(both[at + i]), ups[i] = widened(both[size + at + i]);
            gate_values(gates, ups, y + at, count, (Activation)n->activation);
        }
    return NULL;
}

#endif
