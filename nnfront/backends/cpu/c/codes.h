// SPDX-License-Identifier: Apache-2.0
// How weights in 8 or 4 bits are stored, and what their codes stand for: what `quantized.c` and `quantized_tiles.c` share.

#ifndef NNFRONT_CODES_H
#define NNFRONT_CODES_H

#include "native.h"

#if HAS_KERNELS

// How a weight is stored: what its codes are, and how far a scale reaches.
typedef enum {
    INT8,            // a scale for each output
    INT8_GROUPS,     // a scale for each group of columns
    FLOAT8,          // e4m3fn, a float32 scale for each output
    INT4_GROUPS,     // two to a byte, the first one low, in [-8, 7], a scale for each group
    UINT4_GROUPS,    // the same in [0, 15], with a zero point for each group
} Stored;

INLINE bool is_grouped(const Stored how) { return how == INT8_GROUPS || how >= INT4_GROUPS; }

#define EIGHT(e) N(e, 0), N(e, 1), N(e, 2), N(e, 3), N(e, 4), N(e, 5), N(e, 6), N(e, 7)
#define N(e, m) (e + 120) << 7 | m << 4

// What the codes 0 to 127 of float8 stand for; those of exponent 0 are multiples of 2^-9, and the last one is NaN.
static const uint16_t float8_values[128] = {
    0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60, EIGHT(1), EIGHT(2), EIGHT(3), EIGHT(4), EIGHT(5), EIGHT(6), EIGHT(7), EIGHT(8),
    EIGHT(9), EIGHT(10), EIGHT(11), EIGHT(12), EIGHT(13), EIGHT(14), N(15, 0), N(15, 1), N(15, 2), N(15, 3), N(15, 4), N(15, 5), N(15, 6), 0x7FC0,
};
#undef N
#undef EIGHT

// 0 to 15, then -16 to -1: the last five bits of a number in two's complement.
static const uint16_t integers[32] = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0xC180, 0xC170, 0xC160, 0xC150, 0xC140, 0xC130, 0xC120, 0xC110, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
};

// The same for four bits: the fifth one of an index, which is the next code's, does not matter.
static const uint16_t short_integers[32] = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
};

// The code in the low byte of each word of `low`; its sign is the highest bit of `high`.
FAST INLINE __m512bh float8(const __m512i *table, __m512i low, __m512i high) {
    const __mmask32 is_upper = _mm512_test_epi16_mask(low, _mm512_set1_epi16(0x40));
    const __m512i first = _mm512_permutex2var_epi16(table[0], low, table[1]);
    const __m512i second = _mm512_permutex2var_epi16(table[2], low, table[3]);
    const __m512i size = _mm512_mask_mov_epi16(first, is_upper, second);
    return (__m512bh)_mm512_ternarylogic_epi32(size, high, _mm512_set1_epi16((short)0x8000), 0xF8);  // size | (high & sign)
}

// Products by tiles, where there are, with codes that are not UINT4_GROUPS. Of fewer rows than LEAST_BY_TILES pairs take less time.
enum { LEAST_BY_TILES = 6, MOST_BY_TILES = 64 };
const char *multiply_codes_by_tiles(const struct multiply_quantized *n);

#endif
#endif
