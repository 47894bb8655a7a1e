// SPDX-License-Identifier: Apache-2.0
// Weights in blocks of 256 columns, the last one of a row maybe of 128: Q4_K, Q5_K and Q6_K, as GGUF has them.
//
// Half a block is 64 bytes of four bits, and bits above them. They become bytes of quantised values, those of the low halves and those of the high ones, and these are multiplied where they lie:
// x is brought into their order once for all outputs. What quantised values are more than numbers is taken from sums of x over groups, so that a block costs one more multiplication.

#ifndef NNFRONT_BLOCKS_H
#define NNFRONT_BLOCKS_H

#include "quantized_values.h"

enum {
    HALF = BLOCK / 2,    // columns
    NIBBLES = 64,        // bytes of half a block
    IN_HALF = NIBBLES / VECTOR,
    FACTORS = 16,        // of a block: eight scales and eight minima, or sixteen scales
    MOST_BYTES = 210,    // of a block
    // How many quantised values are beside one another in a word, and what each is more than its number where it is multiplied.
#if AVX512_BF16
    BESIDE = 2,
    MORE = 128,  // 0x4300 | value is 128 + value in bfloat16
#else
    BESIDE = 4,
    MORE = 0,
#endif
    BLOCK_ELEMENTS = BLOCK + FACTORS * sizeof(float) / sizeof(Element),
    BLOCK_VECTORS = FACTORS / FLOATS + BLOCK * sizeof(Element) / VECTOR / BESIDE * (BESIDE + 1),
};

#if AVX512_BF16
typedef Words QuantizedVector;
#else
typedef Bits QuantizedVector;
#endif

INLINE bool has_minima(const Stored how) { return how != Q6_K; }

INLINE int block_bytes(const Stored how) { return how == Q4_K ? 144 : how == Q5_K ? 176 : 210; }

// Where the bytes of four bits begin, and those of bits above them for half a block.
INLINE int nibbles_at(const Stored how) { return how == Q4_K ? 16 : how == Q5_K ? 48 : 0; }
INLINE int above_at(const Stored how, const int half) { return how == Q5_K ? 16 : BLOCK / 2 + 32 * half; }

// The column of the number in the low or the high half of a byte of half a block.
INLINE int column_of(const Stored how, int byte, int is_high) {
    return has_minima(how) ? byte / 32 * 64 + is_high * 32 + byte % 32 : is_high * 64 + byte;
}

// Bring a row of x into the order of the quantised values, with the sums of its groups, as they are multiplied with factors, behind each block.
FAST static void arrange_blocks(const uint16_t *from, Element *to, Py_ssize_t columns, const Stored how) {
    for (Py_ssize_t begin = 0; begin < columns; begin += BLOCK, to += BLOCK_ELEMENTS) {
        const int there = columns - begin < BLOCK ? HALF : BLOCK;
        float sums[FACTORS] = {0};
        memset(to, 0, BLOCK_ELEMENTS * sizeof *to);
        for (int half = 0; half < there / HALF; half++)
            for (int byte = 0; byte < NIBBLES; byte++)
                for (int is_high = 0; is_high < 2; is_high++) {
                    const int column = half * HALF + column_of(how, byte, is_high), group = column / (has_minima(how) ? 32 : 16);
                    const uint16_t given = from[begin + column];
                    const float value = widened(given);
                    const int vector = (half * IN_HALF + byte / VECTOR) * 2 + is_high, word = byte % VECTOR / BESIDE, place = byte % BESIDE;
                    Element *at = to + (vector * BESIDE + place) * (VECTOR / BESIDE) + word;
#if AVX512_BF16
                    *at = given;
#else
                    *at = value / (float)(1u << 8 * place);
#endif
                    if (has_minima(how)) sums[group] -= MORE * value, sums[8 + group] -= value;
                    else sums[group] -= (MORE + 32) * value;
                }
        memcpy(to + BLOCK, sums, sizeof sums);
    }
}

FAST INLINE float of_half(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
#if AVX512
    return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_castsi128_si256(_mm_cvtsi32_si128(half))));
#elif AVX2
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
#else
    const uint32_t bits = (uint32_t)(half & 0x7FFF) << 13;
    float size = (float)(half & 0x3FF) * 0x1p-24f;
    if (half & 0x7C00) {
        const uint32_t moved = bits + (((half & 0x7C00) == 0x7C00 ? 224u : 112u) << 23);
        memcpy(&size, &moved, sizeof size);
    }
    return half & 0x8000 ? -size : size;
#endif
}

// The factors of a block as integers: scales and minima of 6 bits, of groups 0 to 3 in the low bits of bytes, of the others in bytes of their own and the high bits of those.
FAST INLINE void integer_factors(const uint8_t *block, const Stored how, uint8_t *to) {
    if (!has_minima(how)) {
        memcpy(to, block + 192, FACTORS);
        return;
    }
    typedef uint32_t Four32 OF(16);
    Four32 head;
    memcpy(&head, block, sizeof head);
    const Four32 low = {head[1], head[3], head[2], head[3]}, high = {0, head[1], 0, head[2]};
    const Four32 places = {0, 0, 0, 4}, lows = {0x3F3F3F3F, 0x0F0F0F0F, 0x3F3F3F3F, 0x0F0F0F0F};
    const Four32 both = ((low >> places) & lows) | ((high >> 2) & 0x30303030);
    memcpy(to, &both, sizeof both);
}

typedef struct {
    Floats vectors[FACTORS / FLOATS];
} Factors;

// FLOATS of the factors of a block, from one on, as they were unpacked.
FAST INLINE Ints factors_from(const uint8_t *integers, const Stored how, const int first) {
#if AVX512
    const __m128i bytes = _mm_loadu_si128((const __m128i *)integers);
    return (Ints)(has_minima(how) ? _mm512_cvtepu8_epi32(bytes) : _mm512_cvtepi8_epi32(bytes));
#else
    return has_minima(how) ? (Ints)bytes_there(integers + first, FLOATS) : signed_bytes(integers + first);
#endif
}

FAST INLINE float d_of(const uint8_t *block, const Stored how) { return of_half(block + (has_minima(how) ? 0 : 208)); }

// The factors of a block, each times d or, of minima, dmin.
FAST INLINE Factors factors_of(const uint8_t *block, const Stored how) {
    Factors found;
    uint8_t integers[FACTORS];
    integer_factors(block, how, integers);
    const float d = d_of(block, how), dmin = has_minima(how) ? of_half(block + 2) : d;
#pragma GCC unroll 4
    for (int i = 0; i < FACTORS; i += FLOATS) {
#if AVX512
        const Floats by = _mm512_mask_mov_ps(all(d), 0xFF00, all(dmin));
#else
        const Floats by = all(i < 8 ? d : dmin);
#endif
        found.vectors[i / FLOATS] = __builtin_convertvector(factors_from(integers, how, i), Floats) * by;
    }
    return found;
}

// For each lane of a vector of quantised values the factor of its group, of all those of a block; `places` says how far it is from that of the first lane.
FAST INLINE Bits by_groups(const Bits *factors, const Stored how, const int half, const int vector, const int is_high, Ints places) {
    const int first = has_minima(how) ? 4 * half + 2 * (vector * VECTOR / 32) + is_high : 8 * half + 4 * is_high + vector * VECTOR / 16;
#if AVX512
    return (Bits)_mm512_permutexvar_epi32((__m512i)(places + first), (__m512i)factors[0]);
#else
    uint32_t each[FACTORS];
    memcpy(each, factors, sizeof each);
#if AVX2
    if (!has_minima(how)) return (Bits)_mm256_blend_epi32((__m256i)(each[first] - (Bits){0}), (__m256i)(each[first + 1] - (Bits){0}), 0xF0);
#endif
    return each[first] - (Bits){0};
#endif
}

// The same of scales.
FAST INLINE Floats scales_of(const Factors *of, const Stored how, const int half, const int vector, const int is_high, Ints places) {
    return (Floats)by_groups((const Bits *)of->vectors, how, half, vector, is_high, places);
}

FAST INLINE Ints places_of(const Stored how) {
    Ints places;
    for (int lane = 0; lane < FLOATS; lane++) places[lane] = has_minima(how) ? 4 * lane / 32 * 2 : 4 * lane / 16;
    return places;
}

// 32 bytes with four fields of two bits, as many of them as are in a vector, those of the bytes that are multiplied with it in the lowest bits.
FAST INLINE QuantizedVector bits_above(const uint8_t *from, const int vector) {
    QuantizedVector found;
#if VECTOR == 64
    const __m256i once = _mm256_loadu_si256((const __m256i *)from);
    found = (QuantizedVector)_mm512_inserti64x4(_mm512_castsi256_si512(once), _mm256_srli_epi16(once, 2), 1);
#else
    memcpy(&found, from + vector * VECTOR % 32, sizeof found);
    found >>= vector * VECTOR / 32 * 2;
#endif
    return found;
}

#define IN_EACH(byte) ((QuantizedVector){0} + (typeof(((QuantizedVector){0})[0]))(0x01010101u * (byte)))

// The quantised values of a vector of half a block, one in each byte: those of the low halves of bytes, then those of the high ones.
FAST INLINE void quantized_of(const uint8_t *block, const Stored how, const int half, const int vector, QuantizedVector *to) {
    QuantizedVector bytes;
    memcpy(&bytes, block + nibbles_at(how) + half * NIBBLES + vector * VECTOR, sizeof bytes);
    to[0] = bytes & IN_EACH(15);
    to[1] = (bytes >> 4) & IN_EACH(15);
    if (how == Q4_K) return;
    const QuantizedVector above = bits_above(block + above_at(how, half), vector);
    if (how == Q5_K) {
        to[0] |= (half ? above : above << 4) & IN_EACH(16);
        to[1] |= (half ? above >> 1 : above << 3) & IN_EACH(16);
    } else {
        to[0] |= (above << 4) & IN_EACH(48);
        to[1] |= above & IN_EACH(48);
    }
}

// Add to the parts of the first rows what the quantised values of a vector, one in each byte, contribute; of no rows write there what these are multiplied with.
FAST INLINE void add_quantized(QuantizedVector quantized, const Element *x, Py_ssize_t stride, Floats *parts, const int rows) {
#pragma GCC unroll 4
    for (int k = 0; k < BESIDE; k++) {
#if AVX512_BF16
        const Words some = ((k ? quantized >> 8 : quantized & 0xFF)) | 0x4300;
#else
        const Floats some = __builtin_convertvector((Ints)(quantized & 255u << 8 * k), Floats);
#endif
        if (!rows) parts[k] = (Floats)some;
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            const Element *with = x + row * stride + k * (VECTOR / BESIDE);
#if AVX512_BF16
            parts[row] = dot(parts[row], some, words(with));
#else
            parts[row] = fused(some, floats(with), parts[row]);
#endif
        }
    }
}

FAST INLINE void add_block(const Quantized *p, const Stored how, const uint8_t *block, const Element *x, Floats *sums, Ints places, const int rows) {
    const Factors factors = factors_of(block, how);
#pragma GCC unroll 4
    for (int i = 0; i < FACTORS / FLOATS; i++)
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
            sums[row] = fused(factors.vectors[i], floats((const float *)(x + row * p->stride + BLOCK) + i * FLOATS), sums[row]);
    if (!rows) {
        memcpy(sums, factors.vectors, sizeof factors);
        sums += FACTORS / FLOATS;
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
        for (int vector = 0; vector < IN_HALF; vector++) {
            QuantizedVector both[2];
            quantized_of(block, how, half, vector, both);
#pragma GCC unroll 2
            for (int is_high = 0; is_high < 2; is_high++) {
                Floats parts[ROWS_AT_ONCE];
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) parts[row] = all(0.0f);
                add_quantized(both[is_high], x + ((half * IN_HALF + vector) * 2 + is_high) * VECTOR, p->stride, parts, rows);
                const Floats by = scales_of(&factors, how, half, vector, is_high, places);
                if (!rows) {
                    memcpy(sums, parts, BESIDE * sizeof *parts);
                    sums[BESIDE] = by, sums += BESIDE + 1;
                }
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) sums[row] = fused(parts[row], by, sums[row]);
            }
        }
}

// The block that begins at `from`, of so many bytes: a copy that is as long as the others where it is half a one.
FAST INLINE const uint8_t *whole_block(const uint8_t *from, const Stored how, Py_ssize_t bytes, uint8_t *copy) {
    if (bytes >= block_bytes(how)) return from;
    memset(copy, 0, MOST_BYTES);
    if (has_minima(how)) return memcpy(copy, from, (size_t)bytes);
    memcpy(copy, from, 64), memcpy(copy + 128, from + 64, 32), memcpy(copy + 192, from + 96, 8), memcpy(copy + 208, from + 104, 2);
    return copy;
}

// Add to `sums` what the blocks `first` to `end` of output `at` and the first rows of x contribute; of no rows write there what these are multiplied with, decoded.
FAST INLINE void add_blocks(const Quantized *p, const Stored how, Floats *sums, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, const int rows) {
    const Ints places = places_of(how);
    for (Py_ssize_t i = first; i < end; i++) {
        uint8_t copy[MOST_BYTES];
        const uint8_t *from = p->quantized + at * p->bytes + i * block_bytes(how);
        const uint8_t *block = whole_block(from, how, p->bytes - i * block_bytes(how), copy);
#pragma GCC unroll 4
        for (int line = 0; line < block_bytes(how); line += 64) __builtin_prefetch(from + p->ahead + line, 0, 2);
        add_block(p, how, block, p->x + i * BLOCK_ELEMENTS, sums, places, rows);
        if (!rows) sums += BLOCK_VECTORS;
    }
}

// What the numbers of a block stand for.
FAST INLINE void values_of(const uint8_t *block, const Stored how, float *to) {
    const Factors factors = factors_of(block, how);
    float each[FACTORS];
    memcpy(each, factors.vectors, sizeof each);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
        for (int vector = 0; vector < IN_HALF; vector++) {
            QuantizedVector both[2];
            uint8_t bytes[2][VECTOR];
            quantized_of(block, how, half, vector, both);
            memcpy(bytes, both, sizeof bytes);
            for (int is_high = 0; is_high < 2; is_high++)
                for (int i = 0; i < VECTOR; i += FLOATS) {
                    const int column = half * HALF + column_of(how, vector * VECTOR + i, is_high), group = column / (has_minima(how) ? 32 : 16);
                    const Floats quantized = __builtin_convertvector((Ints)bytes_there(bytes[is_high] + i, first_lanes(FLOATS)), Floats);
                    const Floats scale = all(each[group]);
                    // As two steps, each rounded, so that it is the same everywhere.
                    store(to + column, has_minima(how) ? scale * quantized - all(each[8 + group]) : scale * (quantized - 32.0f));
                }
        }
}

// The product of a row, as it was given, with an output where sums of x say nothing.
FAST static float sum_blocks(const Quantized *p, const Stored how, Py_ssize_t at, const uint16_t *row) {
    float sum = 0.0f, values[BLOCK];
    uint8_t copy[MOST_BYTES];
    for (Py_ssize_t from = 0, column = 0; column < p->columns; from += block_bytes(how), column += BLOCK) {
        const Py_ssize_t left = p->columns - column;
        values_of(whole_block(p->quantized + at * p->bytes + from, how, p->bytes - from, copy), how, values);
        for (int i = 0; i < (left < BLOCK ? left : BLOCK); i++) sum += values[i] * widened(row[column + i]);
    }
    return sum;
}

#endif
