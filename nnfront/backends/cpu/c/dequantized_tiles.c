// SPDX-License-Identifier: Apache-2.0
// Products of many rows with a weight in few bits by matrix tiles. What numbers stand for is made of PAIR outputs and DEPTH columns at a time, by one thread, and stays in the nearest
// cache for all rows of x, which lie in the next one in the order of tiles.

#include "product.h"
#include "rounded.h"

enum {
    PAIR = 2 * SIDE,     // outputs, and rows, at a time: four tiles of sums
    DEPTH = 4 * BLOCK,   // columns at a time
    NEXT = DEPTH + LANES,  // from an output in a panel to the next one: no power of two, whose multiples share few places of the nearest cache
    MOST_TOGETHER = 16,  // pairs of tiles of x that are multiplied with what has been dequantised
    MOST_PAIRS = 4,      // of outputs that are multiplied with the same columns of x, so that these come near once
};

typedef struct {
    const struct multiply_dequantized *n;
    Quantized weight;
    Py_ssize_t first, rows, steps;  // rows of x that are multiplied now, and steps of LANES columns
} Many;

// The columns of 16 vectors of 16 become their rows.
TILED INLINE void turn_over(__m512i *rows) {
    __m512i by[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i *from = rows + 4 * i;
        const __m512i low = _mm512_unpacklo_epi32(from[0], from[1]), high = _mm512_unpackhi_epi32(from[0], from[1]);
        const __m512i next_low = _mm512_unpacklo_epi32(from[2], from[3]), next_high = _mm512_unpackhi_epi32(from[2], from[3]);
        by[0][i] = _mm512_unpacklo_epi64(low, next_low), by[1][i] = _mm512_unpackhi_epi64(low, next_low);
        by[2][i] = _mm512_unpacklo_epi64(high, next_high), by[3][i] = _mm512_unpackhi_epi64(high, next_high);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512i even = _mm512_shuffle_i32x4(by[j][0], by[j][1], 0x88), odd = _mm512_shuffle_i32x4(by[j][0], by[j][1], 0xDD);
        const __m512i next_even = _mm512_shuffle_i32x4(by[j][2], by[j][3], 0x88), next_odd = _mm512_shuffle_i32x4(by[j][2], by[j][3], 0xDD);
        rows[j] = _mm512_shuffle_i32x4(even, next_even, 0x88), rows[8 + j] = _mm512_shuffle_i32x4(even, next_even, 0xDD);
        rows[4 + j] = _mm512_shuffle_i32x4(odd, next_odd, 0x88), rows[12 + j] = _mm512_shuffle_i32x4(odd, next_odd, 0xDD);
    }
}

// Bring pairs of tiles of x into their order, [pair, step, tile of the pair, pair of columns, row], zero where x has no rows and columns.
TILED static void pack_pairs(const void *given, Py_ssize_t at, Py_ssize_t end) {
    const Many *m = given;
    const Py_ssize_t columns = m->n->columns;
    const __m512i order = order_of_columns(is_spread((Stored)m->n->stored));
    for (Py_ssize_t tile = 2 * at; tile < 2 * end; tile++)
        for (Py_ssize_t step = 0; step < m->steps; step++) {
            const Py_ssize_t left = columns - step * LANES;
            const __mmask32 mask = left < LANES ? ((__mmask32)1 << left) - 1 : (__mmask32)-1;
            const uint16_t *x = (const uint16_t *)m->n->x + (m->first + tile * SIDE) * columns + step * LANES;
            uint16_t *to = (uint16_t *)m->n->work + ((tile / 2 * m->steps + step) * 2 + tile % 2) * TILE;
            __m512i values[SIDE];
#pragma GCC unroll 16
            for (int row = 0; row < SIDE; row++)
                values[row] = tile * SIDE + row < m->rows ? _mm512_permutexvar_epi16(order, _mm512_maskz_loadu_epi16(mask, x + row * columns)) : _mm512_setzero_si512();
            turn_over(values);
#pragma GCC unroll 16
            for (int pair = 0; pair < SIDE; pair++) _mm512_storeu_si512(to + pair * LANES, values[pair]);
        }
}

// Add to four tiles of sums, or make them, what `steps` steps of PAIR outputs and a pair of tiles of x give.
TILED INLINE void multiply_pair(const uint16_t *weight, const uint16_t *x, float *sums, Py_ssize_t steps, const bool is_first) {
    if (is_first) zero_tiles(4);
    else {
        _tile_loadd(0, sums, 4 * SIDE);
        _tile_loadd(1, sums + SIDE * SIDE, 4 * SIDE);
        _tile_loadd(2, sums + 2 * SIDE * SIDE, 4 * SIDE);
        _tile_loadd(3, sums + 3 * SIDE * SIDE, 4 * SIDE);
    }
    for (Py_ssize_t step = 0; step < steps; step++, weight += LANES, x += 2 * TILE) {
        _tile_loadd(4, weight, 2 * NEXT);
        _tile_loadd(6, x, 2 * LANES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, x + TILE, 2 * LANES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, weight + SIDE * NEXT, 2 * NEXT);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    store_tiles(sums, 4);
}

// Write `there` outputs from `at` on of a pair of tiles of x, from row `first` on, of their sums.
TILED INLINE void finish_pair(const Many *m, const float *sums, Py_ssize_t at, int there, Py_ssize_t first) {
    const struct multiply_dequantized *n = m->n;
    for (int tile = 0; tile < 4; tile++) {
        const int output = tile / 2 * SIDE;
        const Py_ssize_t row = first + tile % 2 * SIDE, left = m->rows - row;
        const Lanes mask = first_lanes(there - output);
        if (there <= output) break;
        __m512i values[SIDE];
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) values[i] = _mm512_loadu_si512(sums + tile * SIDE * SIDE + i * SIDE);
        turn_over(values);
        const Floats bias = n->bias ? widened_vector((const uint16_t *)n->bias + at + output, mask) : all(0.0f);
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++)
            if (i < left) store_rounded((uint16_t *)n->y + (m->first + row + i) * n->outputs + at + output, mask, (Floats)values[i] + bias);
    }
}

// The columns `begin` to `end` of `there` outputs from `at` on into a panel, zero to the end of a step.
TILED INLINE void fill_panel(const Quantized *p, const Stored how, Py_ssize_t at, int there, Py_ssize_t begin, Py_ssize_t end, uint16_t *panel) {
    for (int output = 0; output < there; output++, panel += NEXT) {
        if (is_spread(how)) round_spread(p, how, at + output, begin, end, panel, LANES);
        else round_columns(p, how, at + output, begin, end, panel);
        for (Py_ssize_t i = end - begin; !is_spread(how) && i % LANES; i++) panel[i] = 0;
    }
}

TILED INLINE void dequantized_outputs(const Many *m, const Stored how, Py_ssize_t at, Py_ssize_t end) {
    const struct multiply_dequantized *n = m->n;
    uint16_t panel[PAIR * NEXT] __attribute__((aligned(64)));
    float sums[MOST_PAIRS][MOST_TOGETHER][4 * SIDE * SIDE] __attribute__((aligned(64)));
    memset(panel, 0, sizeof panel);
    use_whole_tiles();
    for (; at < end; at += MOST_PAIRS * PAIR)
        for (Py_ssize_t begin = 0; begin < n->columns; begin += DEPTH)
            for (Py_ssize_t from = at, i = 0; i < MOST_PAIRS && from < end; from += PAIR, i++) {
                const Py_ssize_t stop = n->columns - begin < DEPTH ? n->columns : begin + DEPTH, steps = (stop - begin + LANES - 1) / LANES;
                const int there = end - from < PAIR ? (int)(end - from) : PAIR;
                fill_panel(&m->weight, how, from, there, begin, stop, panel);
                order_memory();
                for (Py_ssize_t pair = 0; pair * PAIR < m->rows; pair++) {
                    float *to = n->columns > DEPTH ? sums[i][pair] : sums[0][0];
                    multiply_pair(panel, (const uint16_t *)n->work + (pair * m->steps + begin / LANES) * 2 * TILE, to, steps, !begin);
                    order_memory();
                    if (stop == n->columns) finish_pair(m, to, from, there, pair * PAIR);
                }
            }
    _tile_release();
}

#define OUTPUTS(how) \
    TILED static void dequantized_outputs_##how(const void *given, Py_ssize_t at, Py_ssize_t end) { dequantized_outputs(given, how, at, end); }
OUTPUTS(INT8) OUTPUTS(INT8_GROUPS) OUTPUTS(FLOAT8) OUTPUTS(FLOAT8_GROUPS) OUTPUTS(INT4_GROUPS) OUTPUTS(UINT4_GROUPS) OUTPUTS(VALUES4)
OUTPUTS(Q4_K) OUTPUTS(Q5_K) OUTPUTS(Q6_K)
#undef OUTPUTS

static const Share dequantized_shares[] = {dequantized_outputs_INT8, dequantized_outputs_INT8_GROUPS, dequantized_outputs_FLOAT8, dequantized_outputs_FLOAT8_GROUPS,
                                           dequantized_outputs_INT4_GROUPS,
                                           dequantized_outputs_UINT4_GROUPS, dequantized_outputs_VALUES4, dequantized_outputs_Q4_K, dequantized_outputs_Q5_K,
                                           dequantized_outputs_Q6_K};

static void multiply_dequantized_by_tiles(const struct multiply_dequantized *n) {
    const Py_ssize_t most = PAIR * (n->together < MOST_TOGETHER ? n->together : MOST_TOGETHER);
    Many m = {.n = n, .weight = WEIGHT_OF(n, n->outputs), .steps = (n->columns + LANES - 1) / LANES};
    for (; m.first < n->rows; m.first += most) {
        m.rows = n->rows - m.first < most ? n->rows - m.first : most;
        in_shares(pack_pairs, &m, (m.rows + PAIR - 1) / PAIR, 1, (unsigned)n->threads);
        in_shares(dequantized_shares[n->stored], &m, n->outputs, PAIR, (unsigned)n->threads);
    }
}
