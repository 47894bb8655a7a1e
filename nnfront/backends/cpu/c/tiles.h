// SPDX-License-Identifier: Apache-2.0
// Matrix tiles (AMX_BF16), for compilers that know them: 16 rows of 64 bytes each.

#ifndef NNFRONT_TILES_H
#define NNFRONT_TILES_H

#include "product.h"

#if HAS_KERNELS

enum { SIDE = 16, TILE = SIDE * LANES, MOST_TILES = 4 };  // rows of a tile; elements; tiles of x at a time

#if defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAS_TILES 1
#define TILED __attribute__((target("amx-tile,amx-bf16,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

// Let all tiles of this thread be whole ones, until `_tile_release`.
TILED INLINE void use_whole_tiles(void) {
    const struct {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64}, .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};
    _tile_loadconfig(&shape);
}

#else
#define HAS_TILES 0
#endif
#endif
#endif
