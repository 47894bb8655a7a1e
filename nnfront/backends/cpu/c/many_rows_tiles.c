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

// What a panel and a pair of tiles of x have given: sums, [tile of outputs, tile of x, output, row], of `there` outputs from `at` on and of PAIR rows from `first` on. Of gates the
// first tile, and the second of what they are multiplied with. No sums if nothing has been multiplied.
typedef struct {
    float *sums;
    Py_ssize_t at, first;
    int there;
} Multiplied;

// How many vectors of sums of a tile of x are to be activated.
INLINE int vectors_of(const Product *p, const Multiplied *of, const bool is_plain) { return is_plain || !of->sums ? 0 : p->is_gated ? SIDE : 2 * SIDE; }

// Add biases to a vector of sums, by number in the order of tiles of x, and activate it.
TILED INLINE void activate(const Product *p, const Multiplied *of, int vector) {
    const int halves = 2 - p->is_gated, half = vector / SIDE % halves, tile = vector / SIDE / halves, i = vector % SIDE;
    float *sums = of->sums + ((2 * half + tile) * SIDE + i) * SIDE;
    const uint16_t *bias = p->bias && half * SIDE + i < of->there ? p->bias + of->at + half * SIDE + i : NULL;
    Floats value = activated(floats(sums) + all(bias ? widened(*bias) : 0.0f), p->activation);
    if (p->is_gated) value *= floats(sums + 2 * SIDE * SIDE) + all(bias ? widened(bias[p->outputs]) : 0.0f);
    store(sums, value);
}

// Sums of a tile, [output, row], as [row, output].
TILED INLINE void turn_sums(const float *sums, __m512i *to) {
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) to[i] = _mm512_load_si512(sums + i * SIDE);
    turn_over(to);
}

// Write what a tile of x gave. If it is plain, with two tiles of outputs in one vector, biases are to be added yet.
TILED INLINE void write_tile(const Product *p, const Multiplied *of, int tile, const bool is_plain) {
    const Py_ssize_t row = of->first + tile * SIDE, rows = p->rows - row;
    const float *sums = of->sums + tile * SIDE * SIDE;
    const Lanes masks[2] = {first_lanes(of->there), first_lanes(of->there > SIDE ? of->there - SIDE : 0)};
    __m512i values[2][SIDE];
    turn_sums(sums, values[0]);
    if (is_plain || !p->is_gated) turn_sums(sums + 2 * SIDE * SIDE, values[1]);
    if (!is_plain) {
        for (int half = 0; half < 2 - p->is_gated; half++)
            for (int i = 0; i < SIDE && i < rows; i++) {
                const Py_ssize_t to = (row + i) * p->outputs + of->at + half * SIDE;
                Floats value = (Floats)values[half][i];
                if (p->added) value += widened_vector(p->added + to, masks[half]);
                store_elements(p->y, p->is_wide, to, masks[half], value);
            }
        return;
    }
    Floats bias[2];
    for (int half = 0; half < 2; half++) bias[half] = p->bias ? widened_vector(p->bias + of->at + half * SIDE, masks[half]) : all(0.0f);
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++)
        if (i < rows) {
            const Py_ssize_t to = (row + i) * p->outputs + of->at;
            Floats value = (Floats)values[0][i] + bias[0], other = (Floats)values[1][i] + bias[1];
            if (p->added) value += widened_vector(p->added + to, masks[0]), other += widened_vector(p->added + to + SIDE, masks[1]);
            const __m256i halves[2] = {_mm512_cvtepi32_epi16((__m512i)nearest_bits(value)), _mm512_cvtepi32_epi16((__m512i)nearest_bits(other))};
            _mm512_mask_storeu_epi16((uint16_t *)p->y + to, _mm512_kunpackw(masks[1], masks[0]), _mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1));
        }
}

// Do what is left to be done with a tile of x, whose vectors from `vector` on are not activated yet. Returns the next tile's first one.
TILED INLINE int finish_tile(const Product *p, const Multiplied *of, int tile, int vector, const bool is_plain) {
    for (; vector < (tile + 1) * vectors_of(p, of, is_plain); vector++) activate(p, of, vector);
    if (of->sums) write_tile(p, of, tile, is_plain);
    return vector;
}

// Add to four tiles of sums, or make them, what `steps` steps of two tiles of the weight, whose rows are `next` apart, and a pair of tiles of x give, the second of which may have no rows.
// Meanwhile what was multiplied before is activated and written: vectors have nothing else to do, and tiles need not wait for them. A tile of the weight `ahead` comes nearer, if there is one.
TILED INLINE void multiply_pair(const uint16_t *weight, const uint16_t *other, const uint16_t *ahead, Py_ssize_t next, const uint16_t *x, const bool are_two, float *sums, Py_ssize_t steps,
                                const bool is_first, const Product *p, const Multiplied *before, const bool is_plain) {
    const int vectors = 2 * vectors_of(p, before, is_plain);
    if (is_first) zero_tiles(4);
    else {
        _tile_loadd(0, sums, 4 * SIDE);
        _tile_loadd(1, sums + SIDE * SIDE, 4 * SIDE);
        _tile_loadd(2, sums + 2 * SIDE * SIDE, 4 * SIDE);
        _tile_loadd(3, sums + 3 * SIDE * SIDE, 4 * SIDE);
    }
    for (int tile = 0, step = 0, vector = 0; tile < 2; tile++) {
        for (; step < steps * (tile + 1) / 2; step++, weight += LANES, other += LANES, x += 2 * TILE) {
            _tile_loadd(4, weight, 2 * next);
            _tile_loadd(6, x, 2 * LANES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, other, 2 * next);
            _tile_dpbf16ps(2, 5, 6);
            if (are_two) {
                _tile_loadd(7, x + TILE, 2 * LANES);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
            for (int row = 0; ahead && row < SIDE; row++) _mm_prefetch((const char *)(ahead + step * LANES + row * next), _MM_HINT_T1);
            for (; vector * steps < vectors * (step + 1); vector++) activate(p, before, vector);
        }
        vector = finish_tile(p, before, tile, vector, is_plain);
    }
    store_tiles(sums, 4);
    order_memory();
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

TILED INLINE void many_outputs(const Many *m, const int how, Py_ssize_t at, Py_ssize_t end, const bool is_plain) {
    const Product *p = &m->product;
    const int each = p->is_gated ? SIDE : PAIR;  // outputs of a panel
    uint16_t panel[PAIR * NEXT] __attribute__((aligned(64)));
    const Py_ssize_t pairs = (p->rows + PAIR - 1) / PAIR, panels = MOST_SUMS_KEPT / pairs;
    float sums[MOST_SUMS_KEPT][4 * SIDE * SIDE] __attribute__((aligned(64)));
    Multiplied before = {0};
    memset(panel, 0, sizeof panel);
    use_whole_tiles();
    for (; at < end; at += panels * each)
        for (Py_ssize_t begin = 0; begin < p->columns; begin += DEPTH)
            for (Py_ssize_t from = at, i = 0; i < panels && from < end; from += each, i++) {
                const Py_ssize_t stop = p->columns - begin < DEPTH ? p->columns : begin + DEPTH, steps = (stop - begin + LANES - 1) / LANES;
                const int there = end - from < each ? (int)(end - from) : each;
                const bool is_whole = how == AS_IT_IS && there == each && (stop - begin) % LANES == 0;
                const uint16_t *weight = panel, *other = panel + SIDE * NEXT;
                if (is_whole) weight = row_of_panel(p, from, 0) + begin, other = row_of_panel(p, from, SIDE) + begin;
                else fill_panel(m, how, from, there, begin, stop, panel);
                order_memory();
                for (Py_ssize_t pair = 0; pair < pairs; pair++) {
                    float *to = sums[p->columns > DEPTH ? i * pairs + pair : (i * pairs + pair) % 2];
                    const uint16_t *x = m->packed + (pair * m->steps + begin / LANES) * 2 * TILE;
                    // More pairs take so long that processors fetch what comes next by themselves.
                    const uint16_t *ahead = is_whole && pairs == 2 ? (pair ? other : weight) + each * p->columns : NULL;
                    multiply_pair(weight, other, ahead, is_whole ? p->columns : NEXT, x, pair * PAIR + SIDE < p->rows, to, steps, !begin, p, &before, is_plain);
                    before = stop < p->columns ? (Multiplied){0} : (Multiplied){to, from, pair * PAIR, there};
                }
            }
    _tile_release();
    for (int tile = 0, vector = 0; tile < 2; tile++) vector = finish_tile(p, &before, tile, vector, is_plain);
}

TILED static void many_outputs_AS_IT_IS(const void *given, Py_ssize_t at, Py_ssize_t end) {
    const Product *p = &((const Many *)given)->product;
    if (p->activation == NOTHING && !p->is_gated && !p->is_wide) many_outputs(given, AS_IT_IS, at, end, true);
    else many_outputs(given, AS_IT_IS, at, end, false);
}

#define OUTPUTS(how) \
    TILED static void many_outputs_##how(const void *given, Py_ssize_t at, Py_ssize_t end) { many_outputs(given, how, at, end, true); }
OUTPUTS(INT8) OUTPUTS(INT8_GROUPS) OUTPUTS(FLOAT8) OUTPUTS(FLOAT8_GROUPS) OUTPUTS(INT4_GROUPS) OUTPUTS(UINT4_GROUPS) OUTPUTS(VALUES4) OUTPUTS(Q4_K) OUTPUTS(Q5_K) OUTPUTS(Q6_K)
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
