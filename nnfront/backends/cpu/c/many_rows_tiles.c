// SPDX-License-Identifier: Apache-2.0
// Products of many rows by matrix tiles, with a weight in bfloat16 or in few bits. PAIR rows of the weight are multiplied with all rows of x, which lie in a near cache in the order of
// tiles, DEPTH columns at a time: where they lie, if they are bfloat16 and whole, or brought together by one thread, as what their numbers stand for. Sums of a weight in bfloat16 are
// added up in the order in which `tiles.c` does it: a row has the same bits among few rows and many.

#include "product.h"
#include "rounded.h"

enum {
    PAIR = 2 * SIDE,       // rows of the weight, and of x, at a time: four tiles of sums
    DEPTH = 4 * BLOCK,     // columns at a time
    NEXT = DEPTH + LANES,  // from a row in a panel to the next one: no power of two, whose multiples share few places of the nearest cache
    MOST_TOGETHER = 16,    // pairs of tiles of x that are multiplied with what is in a panel
    MOST_SUMS_KEPT = 128,  // pairs of tiles of x, times panels that are multiplied with the same columns of them, so that these come near once
    AS_IT_IS = -1,         // in the place of how a weight is stored that is in bfloat16
};

typedef struct {
    Product product;      // of the rows of x that are multiplied now
    Quantized quantized;  // the weight, if it is in few bits
    int how;              // it is stored
    uint16_t *packed;
    Py_ssize_t steps;     // of LANES columns
} Many;

// Bring pairs of tiles of x into their order, [pair, step, tile of the pair, pair of columns, row].
TILED static void pack_pairs(const void *given, Py_ssize_t at, Py_ssize_t end) {
    const Many *m = given;
    const __m512i order = order_of_columns(m->how != AS_IT_IS && is_spread((Stored)m->how));
    for (Py_ssize_t tile = 2 * at; tile < 2 * end; tile++)
        for (Py_ssize_t step = 0; step < m->steps; step++) pack_tile(&m->product, tile, step, order, m->packed + ((tile / 2 * m->steps + step) * 2 + tile % 2) * TILE);
}

// Add to four tiles of sums, or make them, what `steps` steps of two tiles of the weight, whose rows are `next` apart, and a pair of tiles of x give. Meanwhile the same columns of `coming` rows come nearer, a few at a time: more
// requests at once would keep those for x waiting.
TILED INLINE void multiply_pair(const uint16_t *weight, const uint16_t *other, Py_ssize_t next, const uint16_t *x, float *sums, Py_ssize_t steps, const bool is_first,
                                const uint16_t *const *rows, int coming) {
    if (is_first) zero_tiles(4);
    else {
        _tile_loadd(0, sums, 4 * SIDE);
        _tile_loadd(1, sums + SIDE * SIDE, 4 * SIDE);
        _tile_loadd(2, sums + 2 * SIDE * SIDE, 4 * SIDE);
        _tile_loadd(3, sums + 3 * SIDE * SIDE, 4 * SIDE);
    }
    for (Py_ssize_t step = 0; step < steps; step++, weight += LANES, other += LANES, x += 2 * TILE) {
        _tile_loadd(4, weight, 2 * next);
        _tile_loadd(6, x, 2 * LANES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, x + TILE, 2 * LANES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, other, 2 * next);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        for (int i = 0; i < coming; i++) _mm_prefetch((const char *)(rows[i] + step * LANES), _MM_HINT_T1);
    }
    store_tiles(sums, 4);
}

// Sums of a tile, [output, row], as [row, output].
TILED INLINE void turn_sums(const float *sums, __m512i *to) {
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) to[i] = _mm512_load_si512(sums + i * SIDE);
    turn_over(to);
}

// Write `there` outputs from `at` on of a pair of tiles of x, from row `first` on, of their sums. Gates lie in the first half of a panel, what they are multiplied with in the second.
TILED INLINE void finish_pair(const Product *p, const float *sums, Py_ssize_t at, int there, Py_ssize_t first, const bool is_plain) {
    for (int tile = 0; tile < 2; tile++) {
        const Py_ssize_t row = first + tile * SIDE, rows = p->rows - row;
        for (int half = 0; half < 2 - p->is_gated && there > half * SIDE; half++) {
            const Lanes mask = first_lanes(there - half * SIDE);
            const Py_ssize_t output = at + half * SIDE;
            const Floats bias = p->bias ? widened_vector(p->bias + output, mask) : all(0.0f);
            __m512i values[SIDE];
            turn_sums(sums + (2 * half + tile) * SIDE * SIDE, values);
            if (is_plain) {
                uint16_t *y = (uint16_t *)p->y + row * p->outputs + output;
#pragma GCC unroll 16
                for (int i = 0; i < SIDE; i++)
                    if (i < rows) {
                        Floats value = (Floats)values[i] + bias;
                        if (p->added) value += widened_vector(p->added + (row + i) * p->outputs + output, mask);
                        store_rounded(y + i * p->outputs, mask, value);
                    }
                continue;
            }
            __m512i others[SIDE];
            const Floats other_bias = p->bias && p->is_gated ? widened_vector(p->bias + p->outputs + output, mask) : all(0.0f);
            turn_sums(sums + (2 + tile) * SIDE * SIDE, others);
            for (int i = 0; i < SIDE && i < rows; i++) {
                const Py_ssize_t to = (row + i) * p->outputs + output;
                Floats value = activated((Floats)values[i] + bias, p->activation);
                if (p->is_gated) value *= (Floats)others[i] + other_bias;
                if (p->added) value += widened_vector(p->added + to, mask);
                store_elements(p->y, p->is_wide, to, mask, value);
            }
        }
    }
}

// What a row of a panel of outputs from `at` on is in a weight: gates, then what they are multiplied with.
INLINE const uint16_t *row_of_panel(const Product *p, Py_ssize_t at, int row) {
    const int each = p->is_gated ? SIDE : PAIR;
    return p->weight + (row / each * p->outputs + at + row % each) * p->columns;
}

// The columns `begin` to `end` of `there` outputs from `at` on into a panel, zero to the end of a step.
TILED INLINE void fill_panel(const Many *m, const int how, Py_ssize_t at, int there, Py_ssize_t begin, Py_ssize_t end, uint16_t *panel) {
    if (how == AS_IT_IS) {
        for (int row = 0; row < PAIR; row++, panel += NEXT)
            for (Py_ssize_t i = 0; i < end - begin && row % (m->product.is_gated ? SIDE : PAIR) < there; i += LANES) {
                const __mmask32 mask = end - begin - i < LANES ? ((__mmask32)1 << (end - begin - i)) - 1 : (__mmask32)-1;
                _mm512_storeu_si512(panel + i, _mm512_maskz_loadu_epi16(mask, row_of_panel(&m->product, at, row) + begin + i));
            }
        return;
    }
    for (int output = 0; output < there; output++, panel += NEXT) {
        if (is_spread((Stored)how)) round_spread(&m->quantized, (Stored)how, at + output, begin, end, panel, LANES);
        else round_columns(&m->quantized, (Stored)how, at + output, begin, end, panel);
        for (Py_ssize_t i = end - begin; !is_spread((Stored)how) && i % LANES; i++) panel[i] = 0;
    }
}

TILED INLINE void many_outputs(const Many *m, const int how, Py_ssize_t at, Py_ssize_t end) {
    const Product *p = &m->product;
    const int each = p->is_gated ? SIDE : PAIR;  // outputs of a panel
    uint16_t panel[PAIR * NEXT] __attribute__((aligned(64)));
    const Py_ssize_t pairs = (p->rows + PAIR - 1) / PAIR, panels = MOST_SUMS_KEPT / pairs;
    const bool is_plain = p->activation == NOTHING && !p->is_gated && !p->is_wide;
    float sums[MOST_SUMS_KEPT][4 * SIDE * SIDE] __attribute__((aligned(64)));
    memset(panel, 0, sizeof panel);
    use_whole_tiles();
    for (; at < end; at += panels * each)
        for (Py_ssize_t begin = 0; begin < p->columns; begin += DEPTH)
            for (Py_ssize_t from = at, i = 0; i < panels && from < end; from += each, i++) {
                const Py_ssize_t stop = p->columns - begin < DEPTH ? p->columns : begin + DEPTH, steps = (stop - begin + LANES - 1) / LANES;
                const int there = end - from < each ? (int)(end - from) : each;
                const uint16_t *rows[PAIR];  // of the next panel
                for (int row = 0; how == AS_IT_IS && row < PAIR; row++) rows[row] = row_of_panel(p, from + each, row) + begin;
                const bool is_whole = how == AS_IT_IS && there == each && (stop - begin) % LANES == 0;
                const uint16_t *weight = panel, *other = panel + SIDE * NEXT;
                if (is_whole) weight = row_of_panel(p, from, 0) + begin, other = row_of_panel(p, from, SIDE) + begin;
                else fill_panel(m, how, from, there, begin, stop, panel);
                order_memory();
                for (Py_ssize_t pair = 0; pair < pairs; pair++) {
                    float *to = sums[p->columns > DEPTH ? i * pairs + pair : 0];
                    const Py_ssize_t coming = PAIR * pair / pairs, then = how == AS_IT_IS ? PAIR * (pair + 1) / pairs : coming;
                    const uint16_t *x = m->packed + (pair * m->steps + begin / LANES) * 2 * TILE;
                    multiply_pair(weight, other, is_whole ? p->columns : NEXT, x, to, steps, !begin, rows + coming, (int)(then - coming));
                    order_memory();
                    if (stop < p->columns) continue;
                    if (is_plain) finish_pair(p, to, from, there, pair * PAIR, true);
                    else finish_pair(p, to, from, there, pair * PAIR, false);
                }
            }
    _tile_release();
}

#define OUTPUTS(how) \
    TILED static void many_outputs_##how(const void *given, Py_ssize_t at, Py_ssize_t end) { many_outputs(given, how, at, end); }
OUTPUTS(AS_IT_IS) OUTPUTS(INT8) OUTPUTS(INT8_GROUPS) OUTPUTS(FLOAT8) OUTPUTS(FLOAT8_GROUPS) OUTPUTS(INT4_GROUPS) OUTPUTS(UINT4_GROUPS) OUTPUTS(VALUES4)
OUTPUTS(Q4_K) OUTPUTS(Q5_K) OUTPUTS(Q6_K)
#undef OUTPUTS

static const Share dequantized_shares[] = {many_outputs_INT8, many_outputs_INT8_GROUPS, many_outputs_FLOAT8, many_outputs_FLOAT8_GROUPS, many_outputs_INT4_GROUPS, many_outputs_UINT4_GROUPS,
                                           many_outputs_VALUES4, many_outputs_Q4_K, many_outputs_Q5_K, many_outputs_Q6_K};

// Multiply all rows, so many `together`, in memory for as many.
static void multiply_many(Many m, Share share, Py_ssize_t together, Py_ssize_t threads) {
    const Product all_rows = m.product;
    Product *p = &m.product;
    m.steps = (p->columns + LANES - 1) / LANES;
    for (Py_ssize_t first = 0; first < all_rows.rows; first += together) {
        const Py_ssize_t skipped = first * p->outputs;
        p->rows = all_rows.rows - first < together ? all_rows.rows - first : together;
        p->x = all_rows.x + first * p->columns, p->added = all_rows.added ? all_rows.added + skipped : NULL;
        p->y = (char *)all_rows.y + skipped * (p->is_wide ? 4 : 2);
        in_shares(pack_pairs, &m, (p->rows + PAIR - 1) / PAIR, 1, (unsigned)threads);
        in_shares(share, &m, p->outputs, PAIR, (unsigned)threads);
    }
}

static void multiply_many_by_tiles(const Product *p, uint16_t *work, Py_ssize_t threads) {
    multiply_many((Many){.product = *p, .how = AS_IT_IS, .packed = work}, many_outputs_AS_IT_IS, PAIR * MOST_TOGETHER, threads);
}

static void multiply_dequantized_by_tiles(const struct multiply_dequantized *n) {
    const Product p = {.x = n->x, .bias = n->bias, .y = n->y, .rows = n->rows, .columns = n->columns, .outputs = n->outputs, .activation = NOTHING};
    const Py_ssize_t together = n->together < MOST_TOGETHER ? n->together : MOST_TOGETHER;
    multiply_many((Many){.product = p, .quantized = WEIGHT_OF(n, n->outputs), .how = (int)n->stored, .packed = n->work}, dequantized_shares[n->stored], PAIR * together, n->threads);
}
