// SPDX-License-Identifier: Apache-2.0
// Products of few rows, of experts up to 64, with a bfloat16 weight on processors with matrix tiles (AMX_BF16: Sapphire Rapids and later).
//
// A tile is 16 rows of 64 bytes. 16 rows of the weight are one as they lie in memory; x is brought into the order of the other operand, pairs of
// columns of 16 rows next to each other, once for all outputs. What comes out is 16 outputs of 16 rows, the outputs in rows.

#include <sys/syscall.h>
#include <unistd.h>

#include "product.h"

enum { SIDE = 16, TILE = SIDE * LANES, MOST_TILES = 4, LONG_ROW = 1 << 12 };  // rows of a tile; elements; tiles of x at a time; columns from which on processors fetch rows by themselves while there is much to do

#define TILED __attribute__((target("amx-tile,amx-bf16,amx-int8,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")))

// How large tiles are. Not on the stack: compilers know of the first bytes alone that they are read.
typedef struct {
    uint8_t palette, start, zeros[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Shapes;

// Let all tiles of this thread be whole ones, until `_tile_release`.
TILED INLINE void use_whole_tiles(void) {
    static const Shapes whole = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};
    _tile_loadconfig(&whole);
}

// The same for a single row of x: pairs of its columns are a column.
TILED INLINE void use_tiles_of_row(void) {
    static const Shapes of_row = {.palette = 1, .bytes = {4, 0, 0, 0, 64, 4}, .rows = {SIDE, 0, 0, 0, SIDE, SIDE}};
    _tile_loadconfig(&of_row);
}

static bool has_tiles(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    static int known;  // 0: not asked yet, 1: yes, 2: no
    if (!known) {
        uint32_t a, b, c, d;
        __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
        const bool are_there = d >> 22 & d >> 24 & d >> 25 & 1;  // AMX_BF16, AMX_TILE and AMX_INT8
        known = are_there && !syscall(SYS_arch_prctl, REQUEST, TILE_DATA) ? 1 : 2;
    }
    return known == 1;
}

TILED INLINE void zero_tiles(const int tiles) {
    _tile_zero(0);
    if (tiles > 1) _tile_zero(1);
    if (tiles > 2) _tile_zero(2);
    if (tiles > 3) _tile_zero(3);
}

TILED INLINE void store_tiles(float *to, const int tiles) {
    _tile_stored(0, to, 4 * SIDE);
    if (tiles > 1) _tile_stored(1, to + SIDE * SIDE, 4 * SIDE);
    if (tiles > 2) _tile_stored(2, to + 2 * SIDE * SIDE, 4 * SIDE);
    if (tiles > 3) _tile_stored(3, to + 3 * SIDE * SIDE, 4 * SIDE);
}

// Compilers do not know that tiles are loaded from memory and stored to it.
INLINE void order_memory(void) { __asm__ volatile("" : : : "memory"); }

// Tiles of x, or with none its only row, times one of a weight, whose rows are `columns` apart: a step of LANES columns.
TILED INLINE void multiply_step(const uint16_t *weight, Py_ssize_t columns, const uint16_t *x, const int tiles) {
    _tile_loadd(4, weight, 2 * columns);
    if (!tiles) {
        _tile_loadd(5, x, 4);
        _tile_dpbf16ps(0, 4, 5);
    }
#define STEP(tile, with) \
    if (tiles > tile) { \
        _tile_loadd(with, x + tile * TILE, 2 * LANES); \
        _tile_dpbf16ps(tile, 4, with); \
    }
    STEP(0, 5) STEP(1, 6) STEP(2, 5) STEP(3, 6)
#undef STEP
}

// The sums of 16 outputs, the rows of `weight`, and all rows of x: sums [tiles, output, row]. `tiles` is a constant wherever this is inlined.
TILED INLINE void multiply_tiles(float *sums, const Product *p, const uint16_t *weight, int there, const int tiles) {
    const Py_ssize_t columns = p->columns, steps = (columns + LANES - 1) / LANES;
    const bool is_fetched = tiles < 2 || columns < LONG_ROW;
    zero_tiles(tiles);
    for (Py_ssize_t step = 0; step < steps; step++) {
        const uint16_t *x = p->packed + step * (tiles ? tiles * TILE : LANES), *from = weight + step * LANES;
        const Py_ssize_t left = columns - step * LANES;
        if (there < SIDE || left < LANES) {
            uint16_t edge[TILE] __attribute__((aligned(64)));
            const __mmask32 mask = left < LANES ? ((__mmask32)1 << left) - 1 : (__mmask32)-1;
            for (int row = 0; row < SIDE; row++)
                _mm512_store_si512(edge + row * LANES, row < there ? _mm512_maskz_loadu_epi16(mask, from + row * columns) : _mm512_setzero_si512());
            order_memory();
            multiply_step(edge, LANES, x, tiles);
        } else {
            for (int row = 0; is_fetched && row < SIDE; row++) _mm_prefetch((const char *)(weight + SIDE * columns) + (step * SIDE + row) * 64, _MM_HINT_T1);
            multiply_step(from, columns, x, tiles);
        }
    }
    if (tiles) store_tiles(sums, tiles);
    else _tile_stored(0, sums, 4);
    order_memory();
}

// Write `there` outputs from `at` on of all rows from their sums, [tiles, output, row], and if they are gates those of what these are multiplied with.
TILED static void finish_tiles(const Product *p, const float *sums, const float *others, Py_ssize_t at, int there, bool is_of_row) {
    const Lanes mask = first_lanes(there);
    const __m512i apart = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(is_of_row ? 1 : SIDE));
    const Floats bias = p->bias ? widened_vector(p->bias + at, mask) : all(0.0f);
    const Floats other_bias = p->bias && p->is_gated ? widened_vector(p->bias + p->outputs + at, mask) : all(0.0f);
    for (Py_ssize_t row = 0; row < p->rows; row++) {
        const Py_ssize_t to = row * p->outputs + at, from = row / SIDE * SIDE * SIDE + row % SIDE;
        Floats value = activated(_mm512_i32gather_ps(apart, sums + from, 4) + bias, p->activation);
        if (p->is_gated) value *= _mm512_i32gather_ps(apart, others + from, 4) + other_bias;
        if (p->added) value += widened_vector(p->added + to, mask);
        store_elements(p->y, p->is_wide, to, mask, value);
    }
}

TILED INLINE void sums_of_tiles(float *sums, const Product *p, Py_ssize_t at, int there) {
    const uint16_t *weight = p->weight + at * p->columns;
    switch (p->rows == 1 ? 0 : (p->rows + SIDE - 1) / SIDE) {
        case 0: multiply_tiles(sums, p, weight, there, 0); break;
        case 1: multiply_tiles(sums, p, weight, there, 1); break;
        case 2: multiply_tiles(sums, p, weight, there, 2); break;
        case 3: multiply_tiles(sums, p, weight, there, 3); break;
        default: multiply_tiles(sums, p, weight, there, 4);
    }
}

// The outputs `at` to `end` of all rows.
TILED static void outputs_by_tiles(const Product *p, Py_ssize_t at, Py_ssize_t end) {
    float sums[2][MOST_TILES * SIDE * SIDE] __attribute__((aligned(64)));
    if (p->rows == 1) use_tiles_of_row();
    else use_whole_tiles();
    for (; at < end; at += SIDE) {
        const int there = end - at < SIDE ? (int)(end - at) : SIDE;
        sums_of_tiles(sums[0], p, at, there);
        if (p->is_gated) sums_of_tiles(sums[1], p, p->outputs + at, there);
        finish_tiles(p, sums[0], sums[1], at, there, p->rows == 1);
    }
    _tile_release();
}

// The columns of a step in their order, or every fourth one after the other if they are spread.
TILED INLINE __m512i order_of_columns(const bool is_spread) {
    uint16_t order[LANES];
    for (int i = 0; i < LANES; i++) order[i] = (uint16_t)(is_spread ? i % 8 * 4 + i / 8 : i);
    return _mm512_loadu_si512(order);
}

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

// Bring a tile of x, by number, into the order of tiles, [pair of columns, row], zero where x has no rows and columns.
TILED INLINE void pack_tile(const Product *p, Py_ssize_t tile, Py_ssize_t step, __m512i order, uint16_t *to) {
    const Py_ssize_t left = p->columns - step * LANES;
    const __mmask32 mask = left < LANES ? ((__mmask32)1 << left) - 1 : (__mmask32)-1;
    const uint16_t *x = p->x + tile * SIDE * p->columns + step * LANES;
    __m512i values[SIDE];
#pragma GCC unroll 16
    for (int row = 0; row < SIDE; row++)
        values[row] = tile * SIDE + row < p->rows ? _mm512_permutexvar_epi16(order, _mm512_maskz_loadu_epi16(mask, x + row * p->columns)) : _mm512_setzero_si512();
    turn_over(values);
#pragma GCC unroll 16
    for (int pair = 0; pair < SIDE; pair++) _mm512_storeu_si512(to + pair * LANES, values[pair]);
}

// Bring x into the order of tiles, [step, tile, pair of columns, row], from `packed` on, of each step every fourth column one after the other if it is spread. Returns where it ends.
TILED static uint16_t *pack_for_tiles(const Product *p, const bool is_spread, uint16_t *packed) {
    const __m512i order = order_of_columns(is_spread);
    for (Py_ssize_t step = 0; step * LANES < p->columns; step++)
        for (Py_ssize_t tile = 0; tile * SIDE < p->rows; tile++, packed += TILE) pack_tile(p, tile, step, order, packed);
    return packed;
}
