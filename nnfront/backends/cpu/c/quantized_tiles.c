// SPDX-License-Identifier: Apache-2.0
// Products of several rows with a weight in few bits by matrix tiles, as in `tiles.c`: codes become a tile of bfloat16, which holds each of them
// exactly, and the sums of a group are scaled; where groups are too small for that, or are not only scaled, it is what codes stand for that becomes one.

#include <stdlib.h>

#include "codes_bf16.h"
#include "product.h"
#include "rounded.h"

typedef struct {
    const struct multiply_quantized *n;
    Quantized weight;
    const uint16_t *packed;  // x as tiles want it
} Coded;

// Tiles of x times one of a weight, a step of LANES columns.
TILED INLINE void multiply_step(const uint16_t *weight, const uint16_t *x, const int tiles) {
    _tile_loadd(4, weight, 2 * LANES);
#define STEP(tile, with) \
    if (tiles > tile) { \
        _tile_loadd(with, x + tile * TILE, 2 * LANES); \
        _tile_dpbf16ps(tile, 4, with); \
    }
    STEP(0, 5) STEP(1, 6) STEP(2, 5) STEP(3, 6)
#undef STEP
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

// LANES codes of an output as bfloat16, or the first of them that `there` marks.
TILED INLINE __m512i tile_values(const Stored how, const __m512i *table, const uint8_t *codes, __mmask32 there) {
    if (how == INT4_GROUPS || how == UINT4_GROUPS) {
        const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
        const __m512i low = _mm512_and_si512(pairs, _mm512_set1_epi32(15)), high = _mm512_slli_epi32(_mm512_srli_epi32(pairs, 4), 16);
        return _mm512_permutexvar_epi16(_mm512_or_si512(low, high), table[0]);
    }
    const __m256i bytes = _mm256_maskz_loadu_epi8(there, codes);
    if (is_float8(how)) {
        const __m512i words = _mm512_cvtepu8_epi16(bytes);
        return (__m512i)float8(table, words, _mm512_slli_epi16(words, 8));
    }
    const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

// Add to the sums of an output, [tiles, output, row], those of a group times its scale.
TILED INLINE void scale_group(float *sums, const float *parts, const struct multiply_quantized *n, const Stored how, Py_ssize_t at, Py_ssize_t group,
                        int there, const int tiles) {
    for (int output = 0; output < there; output++) {
        const Py_ssize_t which = (at + output) * n->groups + group;
        const __m512 by = _mm512_set1_ps(scale_at(n->scales, (Scales)n->scale_kind, which));
#pragma GCC unroll 4
        for (int tile = 0; tile < tiles; tile++) {
            float *sum = sums + (tile * SIDE + output) * SIDE;
            _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(parts + (tile * SIDE + output) * SIDE), by, _mm512_load_ps(sum)));
        }
    }
}

// The numbers from 0 to 15 less a zero point.
TILED INLINE __m512i less_zero(uint8_t zero) {
    const __m512 from_zero = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), less = _mm512_sub_ps(from_zero, _mm512_set1_ps(zero));
    return (__m512i)_mm512_cvtne2ps_pbh(less, less);
}

// `there` outputs from `at` on; `how` and `tiles` are constants wherever this is inlined.
TILED INLINE void coded_block(const Coded *given, const Stored how, const __m512i *table, Py_ssize_t at, int there, float *sums, const int tiles) {
    const struct multiply_quantized *n = given->n;
    const Py_ssize_t columns = n->columns, bytes = bytes_of(how, columns), group = columns / n->groups;
    float parts[MOST_TILES * SIDE * SIDE] __attribute__((aligned(64)));
    uint16_t some[2][TILE] __attribute__((aligned(64)));
    memset(some, 0, sizeof some);
    memset(sums, 0, sizeof parts);
    for (Py_ssize_t begin = 0; begin < columns; begin += group) {
        zero_tiles(tiles);
        for (Py_ssize_t column = begin; column < begin + group; column += LANES) {
            const Py_ssize_t step = column / LANES, left = columns - column;
            const __mmask32 mask = left < LANES ? ((__mmask32)1 << left) - 1 : (__mmask32)-1;
            const uint8_t *codes = (const uint8_t *)n->codes + at * bytes + (how >= INT4_GROUPS ? column / 2 : column);
            uint16_t *to = some[step % 2];
            for (int output = 0; output < there; output++) {
                if (step % 2 == 0) _mm_prefetch((const char *)codes + output * bytes + CODES_AHEAD, _MM_HINT_T1);
                const Py_ssize_t which = (at + output) * n->groups + begin / group;
                const __m512i own = how == UINT4_GROUPS ? less_zero(((const uint8_t *)n->zeros)[which]) : table[0];
                _mm512_store_si512(to + output * LANES, tile_values(how, how == UINT4_GROUPS ? &own : table, codes + output * bytes, mask));
            }
            __asm__ volatile("" : : "r"(to) : "memory");  // compilers do not know that loading a tile reads memory
            multiply_step(to, given->packed + step * tiles * TILE, tiles);
        }
        store_tiles(parts, tiles);
        scale_group(sums, parts, n, how, at, begin / group, there, tiles);
    }
}

// The same by what codes stand for.
TILED INLINE void rounded_block(const Coded *given, const Stored how, Py_ssize_t at, int there, float *sums, const int tiles) {
    const struct multiply_quantized *n = given->n;
    const Quantized *p = &given->weight;
    uint16_t values[BLOCK] __attribute__((aligned(64))), some[BLOCK / LANES * TILE] __attribute__((aligned(64)));
    memset(values, 0, sizeof values), memset(some, 0, sizeof some);
    zero_tiles(tiles);
    for (Py_ssize_t begin = 0; begin < n->columns; begin += BLOCK) {
        const int count = n->columns - begin < BLOCK ? (int)(n->columns - begin) : BLOCK, steps = (count + LANES - 1) / LANES;
        for (int i = count; i < steps * LANES; i++) values[i] = 0;
        for (int output = 0; output < there; output++) {
            const uint8_t *codes = p->codes + (at + output) * p->bytes + bytes_of(how, begin);
            for (int line = 0; line < bytes_of(how, BLOCK); line += 64) _mm_prefetch((const char *)codes + CODES_AHEAD + line, _MM_HINT_T1);
            round_columns(p, how, at + output, begin, begin + count, values);
            for (int step = 0; step < steps; step++)
                _mm512_store_si512(some + step * TILE + output * LANES, _mm512_load_si512(values + step * LANES));
        }
        __asm__ volatile("" : : "r"(some) : "memory");  // compilers do not know that loading a tile reads memory
        for (int step = 0; step < steps; step++) multiply_step(some + step * TILE, given->packed + (begin / LANES + step) * tiles * TILE, tiles);
    }
    store_tiles(sums, tiles);
}

TILED INLINE void tile_outputs(const Coded *given, const Stored how, Py_ssize_t at, Py_ssize_t end) {
    const struct multiply_quantized *n = given->n;
    const Product p = {.bias = n->bias, .added = n->added, .y = n->y, .rows = n->rows, .columns = n->columns, .outputs = n->outputs};
    float sums[MOST_TILES * SIDE * SIDE] __attribute__((aligned(64)));
    __m512i table[4];
    for (int i = 0; i < 4; i++) table[i] = _mm512_loadu_si512(is_float8(how) ? float8_values + 32 * i : integers);
    use_whole_tiles();
    for (; at < end; at += SIDE) {
        const int there = end - at < SIDE ? (int)(end - at) : SIDE;
        switch ((n->rows + SIDE - 1) / SIDE) {
#define TILES(tiles) \
    if (how >= VALUES4) rounded_block(given, how, at, there, sums, tiles); \
    else coded_block(given, how, table, at, there, sums, tiles)
            case 1: TILES(1); break;
            case 2: TILES(2); break;
            case 3: TILES(3); break;
            default: TILES(4);
#undef TILES
        }
        finish_tiles(&p, sums, at, there);
    }
    _tile_release();
}

#define OUTPUTS(how) \
    TILED static void tile_outputs_##how(const void *given, Py_ssize_t at, Py_ssize_t end) { tile_outputs(given, how, at, end); }
OUTPUTS(INT8) OUTPUTS(INT8_GROUPS) OUTPUTS(FLOAT8) OUTPUTS(FLOAT8_GROUPS) OUTPUTS(INT4_GROUPS) OUTPUTS(UINT4_GROUPS) OUTPUTS(VALUES4) OUTPUTS(Q4_K) OUTPUTS(Q5_K) OUTPUTS(Q6_K)
#undef OUTPUTS

static const Share tile_shares[] = {tile_outputs_INT8, tile_outputs_INT8_GROUPS, tile_outputs_FLOAT8, tile_outputs_FLOAT8_GROUPS, tile_outputs_INT4_GROUPS,
                                    tile_outputs_UINT4_GROUPS, tile_outputs_VALUES4, tile_outputs_Q4_K, tile_outputs_Q5_K, tile_outputs_Q6_K};

static const char *multiply_codes_by_tiles(const struct multiply_quantized *n) {
    const Product p = {.x = n->x, .rows = n->rows, .columns = n->columns};
    uint16_t *packed = packed_for_tiles(&p);
    if (!packed) return no_memory;
    const Py_ssize_t bytes = bytes_of((Stored)n->stored, n->columns);
    const Coded given = {n, WEIGHT_OF(n, n->outputs), packed};
    const unsigned threads = n->outputs * bytes < SMALL_CODES ? 1 : (unsigned)n->threads;
    in_shares(tile_shares[n->stored], &given, n->outputs, (CODES_SHARE / (bytes + 1) / SIDE + 1) * SIDE, threads);
    free(packed);
    return NULL;
}
