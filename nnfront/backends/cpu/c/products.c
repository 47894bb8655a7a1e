// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with a bfloat16 weight.
//
// Such a product takes as long as reading its weight. A kernel that widens bfloat16 to float32 first is slower than the memory; one
// instruction for 32 products is not. Each row of the weight is read once, in order, and multiplied with all rows of x meanwhile. Of several rows the
// arithmetic takes as long, unless the processor has tiles for it (`tiles.c`): of many, a few rows of the weight stay near for all rows of x.

#include <stdlib.h>

#include "activation.h"
#include "product.h"

enum {
    ROWS_TOGETHER = 8,    // rows of x at a time
    MOST_WIDE = REGISTERS < 32 ? 2 : 4,  // rows of the weight at a time
    // Rows of x times rows of the weight, so that all stay in registers, with what is widened where there are no products of bfloat16.
    MOST_SUMS = PAIRS ? REGISTERS - 8 : REGISTERS / 2,
    LEAST_SUMS = PAIRS && VECTOR == 64 ? 1 : 4,  // one sum alone waits for itself, and is as fast as memory only if it is long
    NEAR_X = 7 << 10,  // elements of x that the nearest cache holds beside what passes through it
    SMALL_WEIGHT = 1 << 15, // elements of a weight that take less time than waking threads
    WEIGHT_SHARE = 1 << 16, // elements of a weight that a thread takes at least
    GATES = 1 << 10, // results of a half that a thread holds at a time
};

// activation(product) + what is added to it; or activation(product) * (x @ up.T + its bias), where up lies behind the product's weight
typedef struct {
    Product product;
    Activation activation;
} Activated;

// LANES values, or the first `count` of them.
FAST INLINE Words values_at(const uint16_t *from, const bool is_whole, Py_ssize_t count) { return is_whole ? words(from) : first_words(from, count); }

// Add to `sums` what LANES columns of `wide` rows of the weight and all rows of x contribute.
FAST INLINE void add_columns(Floats *sums, const uint16_t *weight, const uint16_t *x, Py_ssize_t columns, const int rows,
                     const int wide, const bool is_whole, Py_ssize_t count) {
    Words some[MOST_WIDE];
#pragma GCC unroll 4
    for (int j = 0; j < wide; j++) {
        fetch((const char *)(weight + j * columns) + AHEAD);
        some[j] = values_at(weight + j * columns, is_whole, count);
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        const Words with = values_at(x + row * columns, is_whole, count);
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) sums[row * wide + j] = dot(sums[row * wide + j], some[j], with);
    }
}

// `wide` outputs of all rows of x; `rows` and `wide` are constants wherever this is inlined.
FAST INLINE void product_tile(const Product *p, Py_ssize_t at, const int rows, const int wide) {
    const uint16_t *weight = p->weight + at * p->columns;
    const Py_ssize_t whole = p->columns / LANES * LANES;
    const int each = rows * wide, chains = each < LEAST_SUMS ? LEAST_SUMS / each : 1;
    Floats sums[MOST_SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < each * chains; i++) sums[i] = all(0.0f);
    Py_ssize_t i = 0;
    for (; chains > 1 && i + chains * LANES <= whole; i += chains * LANES)
#pragma GCC unroll 4
        for (int chain = 0; chain < chains; chain++) {
            const Py_ssize_t from = i + chain * LANES;
            add_columns(sums + chain * each, weight + from, p->x + from, p->columns, rows, wide, true, 0);
        }
    for (; i < whole; i += LANES) add_columns(sums, weight + i, p->x + i, p->columns, rows, wide, true, 0);
    if (whole < p->columns) {
        add_columns(sums, weight + whole, p->x + whole, p->columns, rows, wide, false, p->columns - whole);
    }
#pragma GCC unroll 4
    for (int chain = 1; chain < chains; chain++)
#pragma GCC unroll 4
        for (int j = 0; j < each; j++) sums[j] += sums[chain * each + j];
#pragma GCC unroll 4
    for (int j = 0; j < wide; j++) {
        const float bias = p->bias ? widened(p->bias[at + j]) : 0.0f;
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            const Py_ssize_t to = row * p->outputs + at + j;
            const float sum = total(sums[row * wide + j]) + bias + (p->added ? widened(p->added[to]) : 0.0f);
            if (p->is_wide)
                ((float *)p->y)[to] = sum;
            else
                ((uint16_t *)p->y)[to] = rounded(sum);
        }
    }
}

FAST static void few_rows(const Product *p, Py_ssize_t at, Py_ssize_t end) {
    // One row of the weight after the other is the order that memory likes best, as long as x is in the nearest cache.
    const bool is_near = p->rows * p->columns <= NEAR_X;
#define WIDE(rows) (MOST_SUMS / rows < MOST_WIDE ? MOST_SUMS / rows : MOST_WIDE)
#define ROWS(rows) \
    case rows: \
        for (; !is_near && at + WIDE(rows) <= end; at += WIDE(rows)) product_tile(p, at, rows, WIDE(rows)); \
        for (; at < end; at++) product_tile(p, at, rows, 1); \
        break;
    switch (p->rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
#undef ROWS
#undef WIDE
}

FAST static void product_outputs(const void *product, Py_ssize_t at, Py_ssize_t end) {
    const Product *p = product;
    if (p->packed) {
        outputs_by_tiles(p, at, end);
        return;
    }
    const Py_ssize_t parts = (p->rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
    const Py_ssize_t step = parts > 1 ? MOST_SUMS / ROWS_TOGETHER : end - at;
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
        const Floats product = activated(floats(gates + i), activation) * floats(ups + i);
        store_rounded(y + i, first_lanes(count - i), product);
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
        product_outputs(&first, 0, count);
        product_outputs(&second, 0, count);
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
        product_outputs(&some, 0, count);
        for (Py_ssize_t row = 0; row < p->rows; row++)
            for (Py_ssize_t i = 0; i < count; i += FLOATS) {
                const Py_ssize_t to = row * p->outputs + at + i;
                const Lanes there = first_lanes(count - i);
                Floats value = activated(floats(values + row * count + i), g->activation);
                if (p->added) value += widened_vector(p->added + to, there);
                if (p->is_wide)
                    store_there((float *)p->y + to, there, value);
                else
                    store_rounded((uint16_t *)p->y + to, there, value);
            }
    }
}

// Let threads do their shares of `outputs`, each of a row of the weight.
static void share_outputs(Share share, const void *work, Py_ssize_t outputs, Py_ssize_t columns, Py_ssize_t threads) {
    in_shares(share, work, outputs, WEIGHT_SHARE / (columns + 1), outputs * columns < SMALL_WEIGHT ? 1 : (unsigned)threads);
}

// Bring x into the order of tiles where these are used, to be freed. Returns false if there is no memory.
static bool pack(Product *p, Py_ssize_t with_tiles) {
    const bool is_tiled = with_tiles && p->rows > 1 && has_tiles();
    p->packed = is_tiled ? packed_for_tiles(p, false) : NULL;
    return p->packed || !is_tiled;
}

// Let threads do their shares of a product, and what `work` does with it, whose product it is.
static const char *run_product(Share share, const void *work, Product *p, Py_ssize_t with_tiles, Py_ssize_t threads) {
    if (p->rows < 1 || p->rows > MOST_ROWS) return refused("1 to %d rows, got %zd", MOST_ROWS, p->rows);
    if (!pack(p, with_tiles)) return no_memory;
    share_outputs(share, work, p->outputs, p->columns, threads);
    free((void *)p->packed);
    return NULL;
}

static const char *multiply(const struct multiply *n) {
    Activated g = {
        .product = {
            .weight = n->weight, .x = n->x, .bias = n->bias, .added = n->added, .y = n->y, .rows = n->rows, .columns = n->columns,
            .outputs = n->outputs, .is_wide = n->is_wide != 0,
        },
        .activation = n->activation,
    };
    const bool is_plain = n->activation >= NOTHING;
    return run_product(is_plain ? product_outputs : activated_outputs, is_plain ? &g.product : (void *)&g, &g.product, n->with_tiles, n->threads);
}

static const char *multiply_gated(const struct multiply_gated *n) {
    Activated g = {
        .product = {.weight = n->weight, .x = n->x, .bias = n->bias, .y = n->y, .rows = n->rows, .columns = n->columns, .outputs = n->outputs},
        .activation = n->activation,
    };
    return run_product(gated_outputs, &g, &g.product, n->with_tiles, n->threads);
}

FAST static const char *gate(const struct gate *n) {
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
