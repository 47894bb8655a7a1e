// SPDX-License-Identifier: Apache-2.0
// Products of rows with a bfloat16 weight.
//
// Of a few rows such a product takes as long as reading its weight. A kernel that widens bfloat16 to float32 first is slower than the memory; one
// instruction for 32 products is not. Of more rows the arithmetic takes as long: as many sums as there are registers for, of some rows of x and some of
// the weight, let each value that is loaded be multiplied several times, and the rows of the weight stay near until all rows of x have been multiplied,
// while the next ones are fetched. The sum of an output and a row has one order, however many rows there are: LANES columns after the other, then `total`.
// Where the processor has tiles, these multiply all rows (`tiles.c`, `many_rows_tiles.c`); elsewhere many rows are multiplied by `many_rows_pairs.c`, or where
// no instruction multiplies bfloat16, widened first (`many_rows_widened.c`).

#include "product.h"

enum {
    ROWS_TOGETHER = 4,  // of x
    WIDE = PAIRS ? 6 : REGISTERS / 8,  // outputs that these are multiplied with, so that the sums stay in registers, and what they are made of
    FEW_WIDE = PAIRS ? 6 : 4,  // the same of half as many rows
    FEW_ROWS = ROWS_TOGETHER / 2,
    FEW_BY_TILES = 32,  // rows that tiles multiply with one of the weight at a time, and more of them with two
    MOST_SUMS = 32,  // a multiple of 16 and of FLOATS
    NEAR_BLOCK = 1 << 12,  // elements of a block that the nearest cache holds beside those before it
    SMALL_WEIGHT = 1 << 15, // elements of a weight that take less time than waking threads
    WEIGHT_SHARE = 1 << 16, // elements of a weight that a thread takes at least
    WHOLE_BLOCKS = 48, // outputs that are whole blocks, gated or not, and whole tiles
    GATES = 1 << 10, // results of a half that a thread holds at a time
    SMALL_GATES = 1 << 14, // results that take less time than waking threads
};

// Some outputs from `at` on, of the gates as many, as all rows of x are multiplied with them: `wide` in all.
typedef struct {
    const Product *product;
    Py_ssize_t at;
    const uint16_t *rows[2];  // of the weight, and of the gates' other half
    float bias[2][MOST_SUMS];  // of each sum
} Outputs;

// What of the rows behind a block is fetched: `each` lines of each half, from so many bytes on, every so many columns, and whether into the nearest cache.
typedef struct {
    Py_ssize_t from, every;
    bool is_near;
} Fetch;

// LANES values, or the first `count` of them.
FAST INLINE Words values_at(const uint16_t *from, const bool is_whole, Py_ssize_t count) { return is_whole ? words(from) : first_words(from, count); }

// Some rows of x, and what is made of them.
INLINE Product rows_of(const Product *p, Py_ssize_t first, Py_ssize_t rows) {
    Product some = *p;
    const Py_ssize_t skipped = first * p->outputs;
    some.rows = rows, some.x += first * p->columns, some.added += some.added ? skipped : 0, some.y = (char *)some.y + skipped * (p->is_wide ? 4 : 2);
    return some;
}

// Write `count` results of a row from `at` on, from their sums and, if `halves` are two, from those of what gates are multiplied with.
FAST INLINE void finish_row(const Product *p, Py_ssize_t row, Py_ssize_t at, Py_ssize_t count, const float *sums, const float *others, const int halves) {
    for (Py_ssize_t i = 0, to = row * p->outputs + at; i < count; i += FLOATS) {
        const Lanes there = first_lanes(count - i);
        Floats y = floats(sums + i);
        if (p->bias) y += widened_vector(p->bias + at + i, there);
        if (p->activation != NOTHING) y = activated(y, p->activation);
        if (halves > 1) y *= p->bias ? floats(others + i) + widened_vector(p->bias + p->outputs + at + i, there) : floats(others + i);
        if (p->added) y += widened_vector(p->added + to + i, there);
        store_elements(p->y, p->is_wide, to + i, there, y);
    }
}

#if PAIRS
#include "many_rows_pairs.c"
#else
#include "many_rows_widened.c"
#endif

// Add to `sums`, [half, row, output], what LANES columns from `at` on contribute.
FAST INLINE void add_columns(Floats *sums, const uint16_t *const *weight, const uint16_t *x, Py_ssize_t columns, Py_ssize_t at, const int rows, const int each,
                             const int halves, const bool is_whole) {
    Words some[6];
#pragma GCC unroll 6
    for (int j = 0; j < each * halves; j++) some[j] = values_at(weight[j / each] + j % each * columns + at, is_whole, columns - at);
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++) {
        const Words with = values_at(x + row * columns + at, is_whole, columns - at);
#pragma GCC unroll 6
        for (int j = 0; j < each * halves; j++) {
            Floats *sum = sums + (j / each * rows + row) * each + j % each;
            *sum = dot(*sum, some[j], with);
        }
    }
}

// Write the results of `rows` rows from `first` on.
FAST INLINE void finish_sums(const Outputs *some, const Floats *sums, Py_ssize_t first, const int rows, const int each, const int halves) {
    const Product *p = some->product;
    float values[2][MOST_SUMS + FLOATS];
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++) {
        store_totals(values[half], sums + half * rows * each, rows * each);
        if (p->bias)
#pragma GCC unroll 8
            for (int i = 0; i < rows * each; i += FLOATS) store(values[half] + i, floats(values[half] + i) + floats(some->bias[half] + i));
    }
    if (halves > 1 || p->activation != NOTHING)
        for (int i = 0; i < rows * each; i += FLOATS) {
            const Floats active = activated(floats(values[0] + i), p->activation);
            store(values[0] + i, halves > 1 ? active * floats(values[1] + i) : active);
        }
    const Py_ssize_t to = first * p->outputs + some->at;
    if (p->added)
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < each; i += FLOATS) {
                const Lanes there = first_lanes(each - i);
                store_there(values[0] + row * each + i, there, floats(values[0] + row * each + i) + widened_vector(p->added + to + row * p->outputs + i, there));
            }
    uint16_t rounded[MOST_SUMS + FLOATS];
    for (int i = 0; i < rows * each && !p->is_wide; i += FLOATS) store_rounded(rounded + i, first_lanes(FLOATS), floats(values[0] + i));
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++) {
        if (p->is_wide) memcpy((float *)p->y + to + row * p->outputs, values[0] + row * each, (size_t)each * sizeof(float));
        else memcpy((uint16_t *)p->y + to + row * p->outputs, rounded + row * each, (size_t)each * sizeof *rounded);
    }
}

// The outputs of a block for `rows` rows from `first` on; `rows`, `each` and `halves` are constants wherever this is inlined.
FAST INLINE void multiply_rows(const Outputs *some, Py_ssize_t first, Fetch fetch, const int rows, const int each, const int halves) {
    const Py_ssize_t columns = some->product->columns, whole = columns / LANES * LANES;
    const uint16_t *x = some->product->x + first * columns;
    Floats sums[MOST_SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * each * halves; i++) sums[i] = all(0.0f);
    for (Py_ssize_t i = 0; i < whole;) {
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
#pragma GCC unroll 6
            for (int line = 0; line < each; line++) {
                const char *there = (const char *)(some->rows[half] + each * columns) + fetch.from + line * LINE;
                if (fetch.is_near) __builtin_prefetch(there, 0, 3);
                else __builtin_prefetch(there, 0, 2);
            }
        fetch.from += each * LINE;
        for (const Py_ssize_t end = i + fetch.every < whole ? i + fetch.every : whole; i < end; i += LANES) add_columns(sums, some->rows, x, columns, i, rows, each, halves, true);
    }
    if (whole < columns) add_columns(sums, some->rows, x, columns, whole, rows, each, halves, false);
    finish_sums(some, sums, first, rows, each, halves);
}

// The outputs `at` to `end` of all rows as far as they are in blocks of `each`; returns where those begin that are not.
FAST INLINE Py_ssize_t multiply_blocks(const Product *p, Py_ssize_t at, Py_ssize_t end, const int each, const int halves) {
    // What is next is fetched by the parts of x in turn, or the first ones of them, one line or more for each that they multiply.
    const Py_ssize_t parts = (p->rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER, fetching = parts < each ? parts : each, every = fetching * LINE / 2;
    const Py_ssize_t fetched = (p->columns + every - 1) / every * each * LINE;
    for (; at + each <= end; at += each) {
        Outputs some = {.product = p, .at = at, .rows = {p->weight + at * p->columns, p->weight + (p->outputs + at) * p->columns}};
        for (int half = 0; p->bias && half < halves; half++)
            for (int i = 0; i < ROWS_TOGETHER * each; i++) some.bias[half][i] = widened(p->bias[half * p->outputs + at + i % each]);
        for (Py_ssize_t part = 0; part < parts; part++) {
            const Py_ssize_t first = p->rows * part / parts;
            const Fetch fetch = part < fetching ? (Fetch){part * fetched, every, each * halves * p->columns <= NEAR_BLOCK} : (Fetch){0, p->columns, false};
#define ROWS(rows) case rows: multiply_rows(&some, first, fetch, rows, each, halves); break;
            switch (p->rows * (part + 1) / parts - first) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) }
#undef ROWS
        }
    }
    return at;
}

#if STREAMS > 1
// The outputs `at` to `end` of one row, as far as they are in blocks of STREAMS that are FLOATS outputs each: of columns of one of each in turn. Returns where those begin that are not.
FAST INLINE Py_ssize_t multiply_in_streams(const Product *p, Py_ssize_t at, Py_ssize_t end, const int halves) {
    const int together = STREAMS / halves;
    const Py_ssize_t columns = p->columns, whole = columns / LANES * LANES, apart = (end - at) / (FLOATS * together) * FLOATS;
    for (const Py_ssize_t behind = at + apart; at < behind; at += FLOATS) {
        Floats sums[STREAMS][FLOATS];
        for (int lane = 0; lane < FLOATS; lane++) {
            const uint16_t *weight[STREAMS];
            Floats of[STREAMS] = {{0}};
            for (int i = 0; i < STREAMS; i++) weight[i] = p->weight + (at + i / halves * apart + i % halves * p->outputs + lane) * columns;
            for (Py_ssize_t column = 0; column < whole; column += LANES) {
#pragma GCC unroll 4
                for (int i = 0; i < STREAMS; i++)
                    if (column % (LINE / 2) == 0) fetch((const uint8_t *)(weight[i] + column) + AHEAD_OF_STREAM);
                add_columns(of, weight, p->x, 0, column, 1, 1, STREAMS, true);
            }
            if (whole < columns) add_columns(of, weight, p->x, columns, whole, 1, 1, STREAMS, false);
            for (int i = 0; i < STREAMS; i++) sums[i][lane] = of[i];
        }
        for (int i = 0; i < STREAMS; i += halves) {
            Outputs some = {.product = p, .at = at + i / halves * apart};
            for (int half = 0; p->bias && half < halves; half++)
                for (int lane = 0; lane < FLOATS; lane++) some.bias[half][lane] = widened(p->bias[half * p->outputs + some.at + lane]);
            finish_sums(&some, sums[i], 0, 1, FLOATS, halves);
        }
    }
    return at + apart * (together - 1);
}

// Not inlined: beside it, sums of several rows are not all kept in registers.
FAST static __attribute__((noinline)) Py_ssize_t one_row_in_streams(const Product *p, Py_ssize_t at, Py_ssize_t end) {
    return p->is_gated ? multiply_in_streams(p, at, end, 2) : multiply_in_streams(p, at, end, 1);
}
#endif

FAST INLINE void multiply_outputs(const Product *product, Py_ssize_t at, Py_ssize_t end, const int halves) {
    const Product own = *product, *p = &own;  // which nothing that is written changes: else it is read again, and sums leave their registers
    if (FEW_WIDE != WIDE && p->rows <= FEW_ROWS) at = multiply_blocks(p, at, end, FEW_WIDE / halves, halves);
    else at = multiply_blocks(p, at, end, WIDE / halves, halves);
    multiply_blocks(p, at, end, 1, halves);
}

FAST static void product_outputs(const void *product, Py_ssize_t at, Py_ssize_t end) {
    const Product *p = product;
#if STREAMS > 1
    if (p->rows == 1 && !p->packed) at = one_row_in_streams(p, at, end);
#endif
    if (p->packed)
        outputs_by_tiles(p, at, end);
    else if (are_many(p))
        multiply_many_rows(p, at, end);
    else if (p->is_gated)
        multiply_outputs(p, at, end, 2);
    else
        multiply_outputs(p, at, end, 1);
}

// Let threads do their shares of `outputs`, each of a row of the weight.
static void share_outputs(Share share, const void *work, Py_ssize_t outputs, Py_ssize_t columns, Py_ssize_t threads) {
    in_shares(share, work, outputs, (WEIGHT_SHARE / (columns + 1) / WHOLE_BLOCKS + 1) * WHOLE_BLOCKS, outputs * columns < SMALL_WEIGHT ? 1 : (unsigned)threads);
}

// Bring x into the order of tiles, from `to` on, where these are used. Returns where it ends.
static uint16_t *pack(Product *p, Py_ssize_t with_tiles, uint16_t *to) {
    p->packed = with_tiles && has_tiles() ? to : NULL;
    if (!p->packed || p->rows > 1) return p->packed ? pack_for_tiles(p, false, to) : to;
    memcpy(to, p->x, (size_t)p->columns * sizeof *to);
    memset(to + p->columns, 0, LANES * sizeof *to);
    return to + p->columns + LANES;
}

static const char *run_product(Product p, Py_ssize_t with_tiles, Py_ssize_t threads, uint16_t *work) {
    if (p.rows < 1) return refused("1 row or more, got 0");
    if (p.rows > FEW_BY_TILES && with_tiles && has_tiles()) {
        multiply_many_by_tiles(&p, work, threads);
        return NULL;
    }
    pack(&p, with_tiles, work);
    if (are_many(&p) && !p.packed && p.outputs * p.columns >= SMALL_WEIGHT) in_shares(product_outputs, &p, p.outputs, MANY_SHARE, (unsigned)threads);
    else share_outputs(product_outputs, &p, p.outputs, p.columns, threads);
    return NULL;
}

static const char *multiply(const struct multiply *n) {
    const Product p = {
        .weight = n->weight, .x = n->x, .bias = n->bias, .added = n->added, .y = n->y, .rows = n->rows, .columns = n->columns, .outputs = n->outputs,
        .is_wide = n->is_wide != 0, .activation = n->activation < NOTHING ? (Activation)n->activation : NOTHING,
    };
    return run_product(p, n->with_tiles, n->threads, n->work);
}

static const char *multiply_gated(const struct multiply_gated *n) {
    const Product p = {
        .weight = n->weight, .x = n->x, .bias = n->bias, .y = n->y, .rows = n->rows, .columns = n->columns, .outputs = n->outputs, .is_gated = true,
        .activation = (Activation)n->activation,
    };
    return run_product(p, n->with_tiles, n->threads, n->work);
}

// Rows, by number.
FAST static void gate_rows(const void *given, Py_ssize_t row, Py_ssize_t last) {
    const struct gate *n = given;
    const Py_ssize_t size = n->size;
    for (; row < last; row++) {
        const uint16_t *both = (const uint16_t *)n->both + 2 * row * size;
        uint16_t *y = (uint16_t *)n->y + row * size;
        for (Py_ssize_t at = 0; at < size; at += FLOATS) {
            const Lanes there = first_lanes(size - at);
            store_rounded(y + at, there, activated(widened_vector(both + at, there), (Activation)n->activation) * widened_vector(both + size + at, there));
        }
    }
}

static const char *gate(const struct gate *n) {
    in_shares(gate_rows, n, n->rows, 1, n->rows * n->size < SMALL_GATES ? 1 : (unsigned)n->threads);
    return NULL;
}
