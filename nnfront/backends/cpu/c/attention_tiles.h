// SPDX-License-Identifier: Apache-2.0
// Attention of rows to a block of tokens by matrix tiles (AMX_BF16), which all rows take where there are any: sums of pairs come together in another order there.
//
// A tile is 16 rows of queries, then of weights; others are 16 pairs of rows of a block as it is laid. Rows beside each other need not see the same: a row has weights of 0 for what others
// see, and a sum is the same with as many zeros. While 16 rows are weighed the values of those ahead of them and the scores of those behind them are multiplied, a product after the other: each
// is stored when the next one begins, so that nothing waits for it.

#ifndef NNFRONT_ATTENTION_TILES_H
#define NNFRONT_ATTENTION_TILES_H

#include "attention_block.h"

enum {
    TILE_COLUMNS = MOST_TILES * SIDE,        // of a product
    SCORE_PRODUCTS = TOKENS / TILE_COLUMNS,  // of 16 rows
};

// 16 rows of factors times columns of a matrix in pairs, and the sums of rows that it is to be added to, if any.
typedef struct {
    float *to;
    const uint16_t *factors;
    const uint32_t *matrix;
    Py_ssize_t next_to, next_factors, panel, steps, columns;  // no columns: there is no product
    float *sums;
    const float *kept, *added;
    Py_ssize_t rows, next_sums;
} TileProduct;

// 16 rows on their way, the part of the block that any of them sees, in whole vectors of tokens, and whether all see all of it.
typedef struct {
    float scores[SIDE][TOKENS], kept[SIDE], added[SIDE];  // weights lie over the scores that they are made of, so that less is to be kept near
    Part part;
    bool is_whole;
} Sixteen;

// All rows that attend to a block.
typedef struct {
    State to;
    const uint16_t *q;
    const Laid *b;
    const Part *parts;
    const Scoring *how;
    Py_ssize_t rows;
    Sixteen sixteens[2];
    float weighted[SIDE][TILE_COLUMNS];
    TileProduct last;
} Tiled;

// Let the sums and factors of products have so many rows, until `end_tiles`. Of one, tiles 0 to 2 are scores, keys and a query, those from 3 on sums of values, weights and values.
TILED static void begin_tiles(Py_ssize_t rows) {
    static const Shapes of_row = {.palette = 1, .bytes = {4, 64, 4, 64, 64, 64, 64}, .rows = {SIDE, SIDE, SIDE, 1, 1, 1, SIDE}};
    if (rows == 1) {
        _tile_loadconfig(&of_row);
        return;
    }
    Shapes shapes = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {0, 0, 0, 0, 0, SIDE, SIDE, SIDE}};
    for (int i = 0; i < 5; i++) shapes.rows[i] = (uint8_t)least(rows, SIDE);
    __asm__ volatile("" : : "r"(&shapes) : "memory");  // compilers know of the first bytes alone that they are read
    _tile_loadconfig(&shapes);
}

TILED static void end_tiles(void) { _tile_release(); }

// Multiply `tiles` times 16 columns, a constant wherever this is inlined.
TILED INLINE void multiply_columns(const TileProduct *p, const int tiles) {
    const uint16_t *factors = p->factors;
    const uint32_t *matrix = p->matrix;
    zero_tiles(tiles);
    for (Py_ssize_t step = 0; step < p->steps; step++, factors += LANES, matrix += SIDE * SIDE) {
        _tile_loadd(4, factors, 2 * p->next_factors);
#define STEP(tile, with) \
        if (tiles > tile) { \
            _tile_loadd(with, matrix + tile * p->panel, 4 * SIDE); \
            _tile_dpbf16ps(tile, 4, with); \
        }
        STEP(0, 5) STEP(1, 6) STEP(2, 7) STEP(3, 5)
#undef STEP
    }
}

// Make sums relative to other scores, and add weighted values.
TILED INLINE void add_weighted(const TileProduct *p) {
    for (Py_ssize_t row = 0; row < p->rows; row++)
        for (Py_ssize_t at = 0; at < p->columns; at += FLOATS) {
            float *to = p->sums + row * p->next_sums + at;
            store(to, fused(floats(p->to + row * p->next_to + at), all(p->added[row]), floats(to) * p->kept[row]));
        }
}

// Store the last product, begin the next one, and add to sums what was stored.
TILED INLINE void turn(Tiled *t, const TileProduct next) {
    const TileProduct last = t->last;
    if (last.columns) {
        _tile_stored(0, last.to, 4 * last.next_to);
        _tile_stored(1, last.to + SIDE, 4 * last.next_to);
    }
    if (last.columns == TILE_COLUMNS) {
        _tile_stored(2, last.to + 2 * SIDE, 4 * last.next_to);
        _tile_stored(3, last.to + 3 * SIDE, 4 * last.next_to);
    }
    if (next.columns == TILE_COLUMNS) multiply_columns(&next, 4);
    else if (next.columns) multiply_columns(&next, 2);
    order_memory();
    if (last.sums) add_weighted(&last);
    t->last = next;
}

INLINE uint16_t *weights_of(const Sixteen *s, Py_ssize_t row) { return (uint16_t *)s->scores[row]; }

INLINE Sixteen *sixteen_of(Tiled *t, Py_ssize_t row) { return t->sixteens + (row / SIDE & 1); }

// What 16 rows from one on see.
static void begin_sixteen(Tiled *t, Py_ssize_t row) {
    Part any = {TOKENS, 0}, every = {0, TOKENS};
    for (Py_ssize_t i = row; i < least(row + SIDE, t->rows); i++) {
        const Part part = t->parts[i];
        every = (Part){most(every.first, part.first), least(every.end, part.end)};
        if (part.end) any = (Part){least(any.first, part.first), most(any.end, part.end)};
    }
    Sixteen *s = sixteen_of(t, row);
    s->part = (Part){any.first / LANES * LANES, rounded_up(any.end, LANES)};
    s->is_whole = !every.first && every.end == TOKENS;
}

// A product of the queries of 16 rows from one on with keys, by number.
static TileProduct score_product(Tiled *t, Py_ssize_t row, Py_ssize_t which) {
    Sixteen *s = sixteen_of(t, row);
    const Laid *b = t->b;
    const Py_ssize_t at = s->part.first + which * TILE_COLUMNS, width = 2 * b->pairs;
    if (row >= t->rows || at >= s->part.end) return (TileProduct){0};
    return (TileProduct){s->scores[0] + at, t->q + row * width, b->keys + at / SIDE * b->key_panel, TOKENS, width, b->key_panel, width / LANES, least(s->part.end - at, TILE_COLUMNS)};
}

// A product of their weights with values.
static TileProduct value_product(Tiled *t, Py_ssize_t row, Py_ssize_t which) {
    const Sixteen *s = sixteen_of(t, row);
    const Laid *b = t->b;
    const Py_ssize_t at = which * TILE_COLUMNS, first = s->part.first;
    if (row < 0 || first >= s->part.end) return (TileProduct){0};
    return (TileProduct){
        t->weighted[0], weights_of(s, 0) + first, b->values + at / SIDE * VALUE_PANEL + first / 2 * SIDE, TILE_COLUMNS, 2 * TOKENS, VALUE_PANEL, (s->part.end - first) / LANES,
        least(b->padded - at, TILE_COLUMNS), t->to.sums + row * b->padded + at, s->kept, s->added, least(t->rows - row, SIDE), b->padded,
    };
}

// Go on to the product of a number: of values for the 16 rows ahead of some, then of scores for those behind them.
TILED static void multiply_beside(Tiled *t, Py_ssize_t row, Py_ssize_t which) {
    const Py_ssize_t of_values = (t->b->padded + TILE_COLUMNS - 1) / TILE_COLUMNS;
    if (which == of_values) begin_sixteen(t, row + SIDE);
    turn(t, which < of_values ? value_product(t, row - SIDE, which) : score_product(t, row + SIDE, which - of_values));
}

// Turn the scores of 16 rows into weights, of 0 where a row does not see what others do, and multiply meanwhile. `is_whole` is a constant wherever this is inlined.
TILED INLINE void weigh_sixteen(Tiled *t, Py_ssize_t row, const bool is_whole) {
    const Py_ssize_t products = (t->b->padded + TILE_COLUMNS - 1) / TILE_COLUMNS + SCORE_PRODUCTS, rows = row < 0 ? 0 : most(least(t->rows - row, SIDE), 0);
    const Scoring *how = t->how;
    Sixteen *s = sixteen_of(t, row);
    Floats sums[SIDE] = {0};
    float greatest[SIDE], totals[SIDE];
    Py_ssize_t done = 0;
    for (Py_ssize_t i = 0; i <= rows; i++) {
        for (; done < products && (i == rows || done * rows <= i * products); done++) multiply_beside(t, row, done);
        if (i < rows) {
            const Part part = is_whole ? (Part){0, TOKENS} : t->parts[row + i];
            greatest[i] = greatest_of(settle(s->scores[i], part.first, part.end, how, row + i)) * scale_left(how);
        }
        if (i > 0) {
            const Part part = is_whole ? (Part){0, TOKENS} : t->parts[row + i - 1];
            sums[i - 1] = weigh(weights_of(s, i - 1), s->scores[i - 1], part.first, part.end, scale_left(how), greatest[i - 1]);
            for (Py_ssize_t j = s->part.first; j < s->part.end && !is_whole; j += LANES)
                if (j + LANES <= part.first || j >= part.end) memset(weights_of(s, i - 1) + j, 0, sizeof(Words));
        }
    }
    store_totals(totals, sums, SIDE);
    if (rows) join_weights((State){NULL, t->to.greatest + row, t->to.totals + row}, greatest, totals, s->kept, s->added, rows);
    order_memory();
}

// Attend with rows to parts of a block.
TILED static void attend_by_tiles(State to, const uint16_t *q, const Laid *b, const Part *parts, const Scoring *how, Py_ssize_t rows) {
    Tiled t __attribute__((aligned(64)));
    t.to = to, t.q = q, t.b = b, t.parts = parts, t.how = how, t.rows = rows, t.last = (TileProduct){0};
    for (Py_ssize_t row = -SIDE; row < rows + SIDE; row += SIDE) {
        if (row >= 0 && sixteen_of(&t, row)->is_whole) weigh_sixteen(&t, row, true);
        else weigh_sixteen(&t, row, false);
    }
    turn(&t, (TileProduct){0});
}

// Whether 16 keys lie as far apart, one after the other.
INLINE bool are_even(const uint16_t *const *keys) {
    Py_ssize_t others = 0;
    for (int i = 1; i < SIDE; i++) others |= keys[i] - keys[0] - i * (keys[1] - keys[0]);
    return !others;
}

// Attend with one row, whose keys are factors as they lie in the cache.
TILED static void attend_row_by_tiles(State to, const uint16_t *q, const Block *block, Py_ssize_t size, const Laid *b, const Scoring *how) {
    const Py_ssize_t first = block->start / LANES * LANES, end = rounded_up(block->end, LANES), width = 2 * b->pairs;
    float scores[TOKENS] __attribute__((aligned(64))), parts[LANES], greatest, kept[FLOATS], added[FLOATS];
    uint16_t weights[TOKENS] __attribute__((aligned(64))), edge[TILE] __attribute__((aligned(64)));
    for (Py_ssize_t token = first; token < end; token += SIDE) {
        const uint16_t *const *keys = block->keys + token;
        const bool is_in_place = token >= block->start && token + SIDE <= block->end && size == width && are_even(keys);
        _tile_zero(0);
        for (Py_ssize_t at = 0; at < width; at += LANES) {
            for (int i = 0; !is_in_place && i < SIDE; i++) {
                const Bits some = features_of(block, block->keys, token + i, at, size);
                memcpy(edge + i * LANES, &some, sizeof some);
            }
            order_memory();
            if (is_in_place) _tile_loadd(1, keys[0] + at, (keys[1] - keys[0]) * 2);
            else _tile_loadd(1, edge, 2 * LANES);
            _tile_loadd(2, q + at, 4);
            _tile_dpbf16ps(0, 1, 2);
        }
        _tile_stored(0, scores + token, 4);
    }
    order_memory();
    greatest = greatest_of(settle(scores, block->start, block->end, how, 0)) * scale_left(how);
    const float all_weights = total(weigh(weights, scores, block->start, block->end, scale_left(how), greatest));
    join_weights(to, &greatest, &all_weights, kept, added, 1);
    order_memory();
    for (Py_ssize_t at = 0; at < b->padded; at += LANES) {
        const uint32_t *values = b->values + at / FLOATS * VALUE_PANEL + first / 2 * FLOATS;
        _tile_zero(3);
        _tile_zero(4);
        for (Py_ssize_t token = first; token < end; token += LANES, values += SIDE * SIDE) {
            _tile_loadd(5, weights + token, 2 * LANES);
            _tile_loadd(6, values, 4 * SIDE);
            _tile_dpbf16ps(3, 5, 6);
            _tile_loadd(6, values + VALUE_PANEL, 4 * SIDE);
            _tile_dpbf16ps(4, 5, 6);
        }
        _tile_stored(3, parts, 4 * SIDE);
        _tile_stored(4, parts + SIDE, 4 * SIDE);
        order_memory();
        for (Py_ssize_t i = 0; i < LANES; i += FLOATS) store(to.sums + at + i, fused(floats(parts + i), all(added[0]), floats(to.sums + at + i) * kept[0]));
    }
}

#endif
