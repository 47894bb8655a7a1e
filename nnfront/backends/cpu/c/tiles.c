// SPDX-License-Identifier: Apache-2.0
// Products of 2 to 64 rows with a bfloat16 weight on processors with matrix tiles (AMX_BF16: Sapphire Rapids and later).
//
// A tile is 16 rows of 64 bytes. 16 rows of the weight are one as they lie in memory; x is brought into the order of the other operand, pairs of
// columns of 16 rows next to each other, once for all outputs. What comes out is 16 outputs of 16 rows, the outputs in rows.

#include <sys/syscall.h>
#include <unistd.h>

#include "product.h"

enum { SIDE = 16, TILE = SIDE * LANES, MOST_TILES = 4 };  // rows of a tile; elements; tiles of x at a time

#define TILED __attribute__((target("amx-tile,amx-bf16,amx-int8,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")))

// Let all tiles of this thread be whole ones, until `_tile_release`.
TILED INLINE void use_whole_tiles(void) {
    static const struct {  // not on the stack: compilers know of the first bytes alone that they are read
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};
    _tile_loadconfig(&shape);
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

// The sums of 16 outputs and all rows of x: sums [tiles, output, row]. `tiles` is a constant wherever this is inlined; `weight` has 16 rows
// `columns` apart, and `next` is what will be wanted after it.
TILED INLINE void multiply_tiles(float *sums, const Product *p, const uint16_t *weight, const char *next, int there, const int tiles) {
    const Py_ssize_t columns = p->columns, steps = (columns + LANES - 1) / LANES;
    _tile_zero(0);
    if (tiles > 1) _tile_zero(1);
    if (tiles > 2) _tile_zero(2);
    if (tiles > 3) _tile_zero(3);
    for (Py_ssize_t step = 0; step < steps; step++) {
        const uint16_t *x = p->packed + step * tiles * TILE, *from = weight + step * LANES;
        const Py_ssize_t left = columns - step * LANES;
        if (there < SIDE || left < LANES) {
            uint16_t edge[TILE] __attribute__((aligned(64)));
            const __mmask32 mask = left < LANES ? ((__mmask32)1 << left) - 1 : (__mmask32)-1;
            for (int row = 0; row < SIDE; row++)
                _mm512_store_si512(edge + row * LANES, row < there ? _mm512_maskz_loadu_epi16(mask, from + row * columns) : _mm512_setzero_si512());
            __asm__ volatile("" : : "r"(edge) : "memory");  // compilers do not know that loading a tile reads memory
            _tile_loadd(4, edge, 2 * LANES);
        } else {
            for (int row = 0; row < SIDE; row++) _mm_prefetch(next + (step * SIDE + row) * 64, _MM_HINT_T1);
            _tile_loadd(4, from, 2 * columns);
        }
#define STEP(tile, with) \
    if (tiles > tile) { \
        _tile_loadd(with, x + tile * TILE, 2 * LANES); \
        _tile_dpbf16ps(tile, 4, with); \
    }
        STEP(0, 5) STEP(1, 6) STEP(2, 5) STEP(3, 6)
#undef STEP
    }
    _tile_stored(0, sums, 4 * SIDE);
    if (tiles > 1) _tile_stored(1, sums + SIDE * SIDE, 4 * SIDE);
    if (tiles > 2) _tile_stored(2, sums + 2 * SIDE * SIDE, 4 * SIDE);
    if (tiles > 3) _tile_stored(3, sums + 3 * SIDE * SIDE, 4 * SIDE);
}

// Write `there` outputs from `at` on of all rows from their sums, [tiles, output, row], after bias and what is added.
TILED static void finish_tiles(const Product *p, const float *sums, Py_ssize_t at, int there) {
    const Lanes mask = first_lanes(there);
    const __m512i apart = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(SIDE));
    const Floats bias = p->bias ? widened_vector(p->bias + at, mask) : all(0.0f);
    for (Py_ssize_t row = 0; row < p->rows; row++) {
        const Py_ssize_t to = row * p->outputs + at;
        Floats sum = _mm512_i32gather_ps(apart, sums + row / SIDE * SIDE * SIDE + row % SIDE, 4);
        sum += bias;
        if (p->added) sum += widened_vector(p->added + to, mask);
        if (p->is_wide)
            store_there((float *)p->y + to, mask, sum);
        else
            store_rounded((uint16_t *)p->y + to, mask, sum);
    }
}

// The outputs `at` to `end` of all rows, without an activation.
TILED static void plain_outputs_by_tiles(const Product *p, Py_ssize_t at, Py_ssize_t end) {
    float sums[MOST_TILES * SIDE * SIDE] __attribute__((aligned(64)));
    use_whole_tiles();
    for (; at < end; at += SIDE) {
        const int there = end - at < SIDE ? (int)(end - at) : SIDE;
        const uint16_t *weight = p->weight + at * p->columns;
        const char *next = (const char *)(weight + SIDE * p->columns);
        switch ((p->rows + SIDE - 1) / SIDE) {
            case 1: multiply_tiles(sums, p, weight, next, there, 1); break;
            case 2: multiply_tiles(sums, p, weight, next, there, 2); break;
            case 3: multiply_tiles(sums, p, weight, next, there, 3); break;
            default: multiply_tiles(sums, p, weight, next, there, 4);
        }
        finish_tiles(p, sums, at, there);
    }
    _tile_release();
}

// The outputs `at` to `end` of all rows: what comes after an activation is made of values in float.
FAST static void outputs_by_tiles(const Product *p, Py_ssize_t at, Py_ssize_t end) {
    enum { VALUES = 1 << 10 };
    const Py_ssize_t most = VALUES / p->rows / FLOATS * FLOATS, halves = 1 + p->is_gated;
    float values[2][VALUES + FLOATS];
    if (p->activation == NOTHING && !p->is_gated) {
        plain_outputs_by_tiles(p, at, end);
        return;
    }
    for (; at < end; at += most) {
        const Py_ssize_t count = most < end - at ? most : end - at;
        for (Py_ssize_t half = 0; half < halves; half++) {
            const Py_ssize_t from = half * p->outputs + at;
            Product part = *p;
            part.weight += from * p->columns, part.bias += p->bias ? from : 0, part.added = NULL;
            part.outputs = count, part.y = values[half], part.is_wide = true;
            plain_outputs_by_tiles(&part, 0, count);
        }
        for (Py_ssize_t row = 0; row < p->rows; row++)
            for (Py_ssize_t i = 0; i < count; i += FLOATS) {
                const Py_ssize_t to = row * p->outputs + at + i;
                const Lanes there = first_lanes(count - i);
                Floats value = activated(floats(values[0] + row * count + i), p->activation);
                if (p->is_gated) value *= floats(values[1] + row * count + i);
                if (p->added) value += widened_vector(p->added + to, there);
                store_elements(p->y, p->is_wide, to, there, value);
            }
    }
}

// The columns of a step in their order, or every fourth one after the other if they are spread.
TILED INLINE __m512i order_of_columns(const bool is_spread) {
    uint16_t order[LANES];
    for (int i = 0; i < LANES; i++) order[i] = (uint16_t)(is_spread ? i % 8 * 4 + i / 8 : i);
    return _mm512_loadu_si512(order);
}

// Bring x into the order of tiles, [step, tile, pair of columns, row], from `packed` on, of each step every fourth column one after the other if it is spread. Returns where it ends.
TILED static uint16_t *pack_for_tiles(const Product *p, const bool is_spread, uint16_t *packed) {
    const Py_ssize_t tiles = (p->rows + SIDE - 1) / SIDE, steps = (p->columns + LANES - 1) / LANES;
    uint16_t *end = packed + steps * tiles * TILE;
    int32_t pairs[SIDE];
    memset(packed, 0, (size_t)(end - packed) * sizeof *packed);
    for (int i = 0; i < SIDE; i++) pairs[i] = i * SIDE;
    const __m512i ordered = order_of_columns(is_spread), apart = _mm512_loadu_si512(pairs);
    for (Py_ssize_t row = 0; row < p->rows; row++)
        for (Py_ssize_t step = 0; step < steps; step++) {
            const Py_ssize_t left = p->columns - step * LANES;
            const __mmask32 mask = left < LANES ? ((__mmask32)1 << left) - 1 : (__mmask32)-1;
            const __m512i values = _mm512_permutexvar_epi16(ordered, _mm512_maskz_loadu_epi16(mask, p->x + row * p->columns + step * LANES));
            _mm512_i32scatter_epi32(packed + (step * tiles + row / SIDE) * TILE + row % SIDE * 2, apart, values, 4);
        }
    return end;
}
