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

// Where the sums of an output and a tile of x are, [row].
INLINE float *sums_of(const Multiplied *of, int tile, int output) { return of->sums + ((output / SIDE * 2 + tile) * SIDE + output % SIDE) * SIDE; }

// The outputs that there are, each half a word.
INLINE __mmask32 outputs_there(const Multiplied *of) { return of->there < PAIR ? ((__mmask32)1 << of->there) - 1 : (__mmask32)-1; }

// The results of an output and a tile of x, [row].
TILED INLINE Floats result_of(const Product *p, const Multiplied *of, int tile, int output, const bool is_plain) {
    const float *sums = sums_of(of, tile, output);
    const uint16_t *bias = p->bias && output < of->there ? p->bias + of->at + output : NULL;
    const Floats value = floats(sums) + all(bias ? widened(*bias) : 0.0f);
    if (is_plain) return value;
    const Floats active = activated(value, p->activation);
    return p->is_gated ? active * (floats(sums + 2 * SIDE * SIDE) + all(bias ? widened(bias[p->outputs]) : 0.0f)) : active;
}

// What is added to the results of a tile of x, or zero: [pair of outputs, row].
TILED INLINE void fetch_added(const Product *p, const Multiplied *of, int tile, __m512i *words) {
    const Py_ssize_t row = of->first + tile * SIDE;
    const __mmask32 mask = outputs_there(of);
    __m512i rows[SIDE];
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) rows[i] = row + i < p->rows ? _mm512_maskz_loadu_epi16(mask, p->added + (row + i) * p->outputs + of->at) : _mm512_setzero_si512();
    turn_over(rows);
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) words[i] = rows[i];
}

// Make the results of two outputs, from `output` on, and a tile of x: of each row a word.
TILED INLINE void make_words(const Product *p, const Multiplied *of, int tile, int output, __m512i *word, const bool is_plain) {
    Floats low = result_of(p, of, tile, output, is_plain), high = result_of(p, of, tile, output + 1, is_plain);
    if (p->added) low += (Floats)_mm512_slli_epi32(*word, 16), high += (Floats)_mm512_and_si512(*word, _mm512_set1_epi32((int)0xFFFF0000));
    *word = _mm512_or_si512((__m512i)nearest_bits(low), _mm512_slli_epi32((__m512i)nearest_bits(high), 16));
}

// Write words of both tiles of x if these are of gates, else of one.
TILED INLINE void write_words(const Product *p, const Multiplied *of, int tile, const __m512i *words) {
    const Py_ssize_t row = of->first + tile * SIDE, rows = p->rows - row;
    const __mmask32 mask = outputs_there(of);
    uint16_t *y = (uint16_t *)p->y + row * p->outputs + of->at;
    __m512i values[SIDE];
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) values[i] = words[i];
    turn_over(values);
    if (p->is_gated) {
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) {
            if (i < rows) _mm256_mask_storeu_epi16(y + i * p->outputs, (__mmask16)mask, _mm512_castsi512_si256(values[i]));
            if (i + SIDE < rows) _mm256_mask_storeu_epi16(y + (i + SIDE) * p->outputs, (__mmask16)mask, _mm512_extracti64x4_epi64(values[i], 1));
        }
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++)
            if (i < rows) _mm512_mask_storeu_epi16(y + i * p->outputs, mask, values[i]);
    }
}

// Write results of a tile of x as they are, and what is added to them.
TILED INLINE void write_wide(const Product *p, const Multiplied *of, int tile) {
    for (int half = 0; half < 2; half++) {
        const Lanes mask = first_lanes(of->there > half * SIDE ? of->there - half * SIDE : 0);
        __m512i values[SIDE];
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) values[i] = _mm512_load_si512(sums_of(of, tile, half * SIDE + i));
        turn_over(values);
        for (int i = 0; i < SIDE && of->first + tile * SIDE + i < p->rows; i++) {
            const Py_ssize_t to = (of->first + tile * SIDE + i) * p->outputs + of->at + half * SIDE;
            store_there((float *)p->y + to, mask, (Floats)values[i] + (p->added ? widened_vector(p->added + to, mask) : all(0.0f)));
        }
    }
}

// Make results of what is part `i` of SIDE of them, or if they are wide, bring them to where their sums are. Where they are written comes near: stores that wait for it let all others wait.
TILED INLINE void make_results(const Product *p, const Multiplied *of, int i, __m512i (*words)[SIDE], const bool is_plain) {
    for (int tile = 0; tile < 2; tile++) {
        const Py_ssize_t to = (of->first + tile * SIDE + i) * p->outputs + of->at;
        __builtin_prefetch((const char *)p->y + to * (!is_plain && p->is_wide ? 4 : 2), 1);
    }
    if (!is_plain && p->is_gated) {
        make_words(p, of, i / (SIDE / 2), i % (SIDE / 2) * 2, words[0] + i, false);
        return;
    }
    for (int tile = 0; tile < 2; tile++) {
        if (is_plain || !p->is_wide) make_words(p, of, tile, 2 * i, words[tile] + i, is_plain);
        else
            for (int output = 2 * i; output < 2 * i + 2; output++)
                store(sums_of(of, tile, output), result_of(p, of, tile, output, false));
    }
}

// Two tiles of the weight, whose rows are `next` apart, and a pair of tiles of x, the second of which may have no rows.
typedef struct {
    const uint16_t *weight, *other, *x;
    const uint16_t *ahead;  // rows of the weight, so many of them, that come nearer meanwhile
    Py_ssize_t next;
    int steps;  // that are left
    int rows_ahead;
    bool are_two;
} Pair;

// Multiply a step of them, if there is one.
TILED INLINE void multiply_step_of(Pair *pair) {
    if (!pair->steps) return;
    _tile_loadd(4, pair->weight, 2 * pair->next);
    _tile_loadd(6, pair->x, 2 * LANES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, pair->other, 2 * pair->next);
    _tile_dpbf16ps(2, 5, 6);
    if (pair->are_two) {
        _tile_loadd(7, pair->x + TILE, 2 * LANES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    for (int row = 0; row < pair->rows_ahead; row++) _mm_prefetch((const char *)(pair->ahead + row * pair->next), _MM_HINT_T1);
    pair->weight += LANES, pair->other += LANES, pair->x += 2 * TILE, pair->ahead += LANES, pair->steps--;
}

// Finish what was multiplied before, step by step between those of a pair.
TILED INLINE void finish_before(const Product *p, const Multiplied *of, __m512i (*words)[SIDE], Pair *pair, const bool is_plain) {
    const bool is_wide = !is_plain && p->is_wide;
    for (int tile = 0; p->added && !is_wide && tile < 2; tile++) {
        multiply_step_of(pair);
        fetch_added(p, of, tile, words[tile]);
    }
    for (int i = 0; i < SIDE; i++) {
        multiply_step_of(pair);
        make_results(p, of, i, words, is_plain);
    }
    for (int tile = 0; tile < (!is_plain && p->is_gated ? 1 : 2); tile++) {
        multiply_step_of(pair);
        if (is_wide) write_wide(p, of, tile);
        else write_words(p, of, tile, words[tile]);
    }
}

// Add to four tiles of sums, or make them, what a pair gives. Meanwhile what was multiplied before is finished: vectors have nothing else to do, and tiles need not wait for them.
TILED INLINE void multiply_pair(Pair pair, float *sums, const bool is_first, const Product *p, const Multiplied *before, __m512i (*words)[SIDE], const bool is_plain) {
    if (is_first) zero_tiles(4);
    else {
        _tile_loadd(0, sums, 4 * SIDE);
        _tile_loadd(1, sums + SIDE * SIDE, 4 * SIDE);
        _tile_loadd(2, sums + 2 * SIDE * SIDE, 4 * SIDE);
        _tile_loadd(3, sums + 3 * SIDE * SIDE, 4 * SIDE);
    }
    if (before->sums) finish_before(p, before, words, &pair, is_plain);
    while (pair.steps) multiply_step_of(&pair);
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
    __m512i words[2][SIDE];
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
                    // Every other pair has some rows of a tile of the next panel come nearer.
                    const int ahead = (SIDE + ((int)pairs - 1) / 2) / (((int)pairs + 1) / 2), first = (int)pair / 2 * ahead, left = first < SIDE ? SIDE - first : 0;
                    const Pair both = {
                        .weight = weight, .other = other, .x = x, .next = is_whole ? p->columns : NEXT, .steps = (int)steps, .are_two = pair * PAIR + SIDE < p->rows,
                        .ahead = (pair % 2 ? other : weight) + (each + first) * p->columns, .rows_ahead = !is_whole ? 0 : ahead < left ? ahead : left,
                    };
                    multiply_pair(both, to, !begin, p, &before, words, is_plain);
                    before = stop < p->columns ? (Multiplied){0} : (Multiplied){to, from, pair * PAIR, there};
                }
            }
    _tile_release();
    if (before.sums) finish_before(p, &before, words, &(Pair){0}, is_plain);
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
