// SPDX-License-Identifier: Apache-2.0
// Products of several rows with a weight in few bits by matrix tiles, as in `tiles.c`: quantised values become tiles of bfloat16, which holds each of them
// exactly, and the sums of a group are scaled; where groups are too small for that it is what quantised values stand for that becomes them.

#include "quantized_values_bf16.h"
#include "product.h"
#include "rounded.h"

enum {
    PANEL = 512,  // columns that are decoded at a time, of SIDE outputs: beside them x passes through the nearest cache
    PANEL_GROUPS = PANEL / LANES,
};

typedef struct {
    const struct multiply_quantized *n;
    Quantized weight;
    const uint16_t *packed;  // x as tiles want it
    const float *sums;       // of x over groups, [group, tile, row], where quantised values are multiplied as less than they stand for
} QuantizedTiles;

// Columns of SIDE outputs: numbers that tiles multiply, and what the sums of a group are multiplied with, and those of x over it.
typedef struct {
    uint16_t values[PANEL_GROUPS][TILE];
    float scales[SIDE][PANEL_GROUPS], offsets[SIDE][PANEL_GROUPS];
} __attribute__((aligned(64))) Panel;

// Whether tiles hold quantised values as they are, and sums are scaled.
INLINE bool is_scaled(const Stored how, const int shift) { return how != Q6_K && (how != VALUES4 || 1 << shift >= LANES); }

INLINE bool has_sums(const Stored how) { return how == Q4_K || how == Q5_K || has_offset(how); }

// Whether of each step every fourth column is multiplied after the other, which is the order in which bits come apart.
INLINE bool is_spread(const Stored how) { return how == Q6_K || (how >= INT4_GROUPS && how <= VALUES4); }

// LANES quantised values of 8 bits of an output as bfloat16, or the first of them that `there` marks.
TILED INLINE __m512i tile_values(const Stored how, const __m512i *table, const uint8_t *quantized, __mmask32 there) {
    const __m256i bytes = _mm256_maskz_loadu_epi8(there, quantized);
    if (is_float8(how)) {
        const __m512i words = _mm512_cvtepu8_epi16(bytes);
        return (__m512i)float8(table, words, _mm512_slli_epi16(words, 8));
    }
    const __m512i first = (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return (__m512i)_mm512_cvtne2ps_pbh(second, (__m512)first);
}

// Of 32 numbers of four bits each quarter of a vector has all bytes, and its own bits of their words lowest, when they have been moved so far.
TILED INLINE __m512i quarter_bits(void) {
    return _mm512_set_epi64(0x000C000C000C000C, 0x000C000C000C000C, 0x0008000800080008, 0x0008000800080008, 0x0004000400040004, 0x0004000400040004, 0, 0);
}

// LANES numbers of four bits as what a table has for them, of each four the first ones first. `are_two` says that it has two groups of 16: the second's in its second half.
TILED INLINE void look_up_spread(__m128i some, __m512i table, uint16_t *to, const bool are_two) {
    const __m512i half = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0010001000100010, 0)), words = _mm512_srlv_epi16(_mm512_broadcast_i32x4(some), quarter_bits());
    const __m512i places = are_two ? _mm512_ternarylogic_epi32(words, _mm512_set1_epi16(15), half, 0xEA) : words;  // (words & 15) | half
    _mm512_store_si512(to, _mm512_permutexvar_epi16(places, table));
}

// Numbers of four bits of an output as what they stand for, the columns `begin` to `end`; steps are `next` apart.
TILED INLINE void round_four_spread(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t begin, Py_ssize_t end, uint16_t *to, const int next,
                                    const bool are_two) {
    const uint8_t *from = p->quantized + at * p->bytes + begin / 2;
    const int bytes = LANES / 2, steps = are_two ? 1 : 1 << p->shift >> 5;
    float scales[FLOATS], zeros[FLOATS] = {0};
    const Floats unscaled = unscaled_values(p, how, 0);
    for (Py_ssize_t group = begin >> p->shift, last = end >> p->shift; group < last; group += FLOATS) {
        const int count = last - group < FLOATS ? (int)(last - group) : FLOATS;
        const Lanes there = first_lanes(count);
        store(scales, group_scales(p, at, group, there));
        if (how == UINT4_GROUPS) store(zeros, __builtin_convertvector((Ints)bytes_there(p->zeros + at * p->groups + group, there), Floats));
        for (int i = 0; i < count; i += 1 + are_two) {
            const Floats first = (how == UINT4_GROUPS ? unscaled - all(zeros[i]) : unscaled) * all(scales[i]);
            const __m512i table = rounded_pair(first, are_two ? unscaled * all(scales[i + 1]) : first);
            if (are_two && i + 1 == count) look_up_spread(_mm_loadl_epi64((const __m128i *)from), table, to, true);
            else
                for (int step = 0; step < steps; step++, from += bytes, to += next) look_up_spread(_mm_loadu_si128((const __m128i *)from), table, to, are_two);
        }
    }
}

// The same of numbers of six bits: 128 more than each is a float by its bits, and less as much again one multiplication and sum.
TILED INLINE void round_six_spread(const Quantized *p, Py_ssize_t at, Py_ssize_t begin, Py_ssize_t end, uint16_t *to, const int next) {
    const __m512i mask = _mm512_set1_epi32(0xFF << 16), more = _mm512_set1_epi32(0x43000000);
    const __m512i first = _mm512_inserti64x4(_mm512_set1_epi32(8), _mm256_set1_epi32(16), 0), second = _mm512_inserti64x4(_mm512_set1_epi32(24), _mm256_setzero_si256(), 0);
    const __m512i groups = _mm512_set_epi32(1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0);
    for (Py_ssize_t column = begin, at_byte = bytes_of(Q6_K, begin); column < end; column += BLOCK, at_byte += block_bytes(Q6_K)) {
        uint8_t copy[MOST_BYTES], quantized[BLOCK];
        const uint8_t *block = whole_block(p->quantized + at * p->bytes + at_byte, Q6_K, p->bytes - at_byte, copy);
        const Floats scales = factors_of(block, Q6_K).vectors[0], less = scales * -160.0f;
        for (int half = 0; half < 2; half++) {
            QuantizedVector both[2];
            quantized_of(block, Q6_K, half, 0, both);
            memcpy(quantized + half * HALF, both, sizeof both);
        }
        for (int step = 0; step < BLOCK / LANES && column + step * LANES < end; step++, to += next) {
            const __m512i bytes = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(quantized + step * LANES)));
            const __m512i places = _mm512_add_epi32(groups, _mm512_set1_epi32(2 * step));
            const Floats by = _mm512_permutexvar_ps(places, scales), of_less = _mm512_permutexvar_ps(places, less);
            const Floats low = (Floats)_mm512_ternarylogic_epi32(_mm512_rolv_epi32(bytes, first), mask, more, 0xEA);  // (bytes & mask) | more
            const Floats high = (Floats)_mm512_ternarylogic_epi32(_mm512_rolv_epi32(bytes, second), mask, more, 0xEA);
            _mm512_store_si512(to, rounded_pair(fused(low, by, of_less), fused(high, by, of_less)));
        }
    }
}

TILED INLINE void round_spread(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t begin, Py_ssize_t end, uint16_t *to, const int next) {
    if (how == Q6_K) round_six_spread(p, at, begin, end, to, next);
    else if (how == VALUES4 && p->shift == 4) round_four_spread(p, how, at, begin, end, to, next, true);
    else round_four_spread(p, how, at, begin, end, to, next, false);
}

// The columns from `begin` on of an output, `count` of them, into its rows of a panel.
TILED INLINE void decode_columns(const Quantized *p, const Stored how, const __m512i *table, Py_ssize_t at, Py_ssize_t begin, int count, uint16_t *to) {
    const uint8_t *quantized = p->quantized + at * p->bytes + bytes_of(how, begin);
    if (how < INT4_GROUPS) {
        for (int column = 0; column < count; column += LANES, to += TILE) {
            const __mmask32 mask = count - column < LANES ? ((__mmask32)1 << (count - column)) - 1 : (__mmask32)-1;
            _mm512_store_si512(to, tile_values(how, table, quantized + column, mask));
        }
        return;
    }
    const __m512i bits = quarter_bits();
#pragma GCC unroll 4
    for (const uint8_t *end = quantized + count / 2; quantized < end; quantized += LANES / 2, to += TILE) {
        const __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)quantized));
        _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_srlv_epi16(words, bits), table[0]));
    }
}

// Have all that is stored of columns of an output come nearer.
TILED INLINE void fetch_next(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t begin, int count) {
    const char *quantized = (const char *)p->quantized + at * p->bytes + bytes_of(how, begin);
    for (Py_ssize_t line = 0; line < bytes_of(how, count); line += 64) _mm_prefetch(quantized + line, _MM_HINT_T1);
    if (!is_grouped(how) || in_blocks(how)) return;
    const Py_ssize_t from = at * p->groups + (begin >> p->shift), groups = ((count - 1) >> p->shift) + 1;
    const int log = scale_bytes_log2(p->kind);
    for (Py_ssize_t line = 0; line < groups << log; line += 64) _mm_prefetch((const char *)p->scales + (from << log) + line, _MM_HINT_T1);
    if (how == UINT4_GROUPS) _mm_prefetch((const char *)p->zeros + from, _MM_HINT_T1);
}

// The scales of an output from a group on, and its offsets.
TILED INLINE void scales_of_columns(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t group, float *scales, float *offsets) {
    const Py_ssize_t from = at * p->groups + group;
    const Lanes there = first_lanes(p->groups - group);
    const Floats by = group_scales(p, at, group, there);
    store(scales, by);
    if (how == UINT4_GROUPS) store(offsets, by * (8.0f - __builtin_convertvector((Ints)bytes_there(p->zeros + from, there), Floats)));
}

// The same of both for blocks of 4 or 5 bits, which hold their scales.
TILED INLINE void decode_blocks(const Quantized *p, const Stored how, const __m512i *table, Py_ssize_t at, Py_ssize_t begin, int count, uint16_t *to, float *scales,
                                float *offsets) {
    const uint8_t *quantized = p->quantized + at * p->bytes + bytes_of(how, begin);
    for (int column = 0; column < count; column += BLOCK, quantized += block_bytes(how), scales += 8, offsets += 8) {
        uint8_t copy[MOST_BYTES];
        const uint8_t *block = whole_block(quantized, how, bytes_of(how, count - column < BLOCK ? count - column : BLOCK), copy);
        const __m512 factors = (__m512)factors_of(block, how).vectors[0];
        _mm256_storeu_ps(scales, _mm512_castps512_ps256(factors));
        _mm256_storeu_ps(offsets, _mm256_sub_ps(_mm256_setzero_ps(), _mm512_extractf32x8_ps(factors, 1)));
        const __m512i above = how == Q5_K ? word_of_each(block + above_at(how, 0), LANES) : _mm512_setzero_si512(), fifth = _mm512_set1_epi16(16);
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++, to += 2 * TILE) {
            if (column + part * 2 * LANES >= count) return;
            const __m512i words = word_of_each(block + nibbles_at(how) + LANES * part, LANES);
            __m512i low = words, high = _mm512_srli_epi16(words, 4);
            if (how == Q5_K) {
                const __m512i first = part < 2 ? _mm512_slli_epi16(above, 4 - 2 * part) : _mm512_srli_epi16(above, 2 * part - 4);
                const __m512i second = part < 2 ? _mm512_slli_epi16(above, 3 - 2 * part) : _mm512_srli_epi16(above, 2 * part - 3);
                low = _mm512_ternarylogic_epi32(fifth, first, low, 0xCA);  // of each bit the first's where `fifth` has it
                high = _mm512_ternarylogic_epi32(fifth, second, high, 0xCA);
            }
            _mm512_store_si512(to, _mm512_permutexvar_epi16(low, table[0]));
            _mm512_store_si512(to + TILE, _mm512_permutexvar_epi16(high, table[0]));
        }
    }
}

// The sums of a group of a tile of x: the steps from `values` and `x` on.
#define MULTIPLY_GROUP(tile, weight, with, to) \
    do { \
        _tile_zero(tile); \
        for (int step = 0; step < steps; step++, values += TILE, x += tiles * TILE) { \
            _tile_loadd(weight, values, 2 * LANES); \
            _tile_loadd(with, x, 2 * LANES); \
            _tile_dpbf16ps(tile, weight, with); \
        } \
        _tile_stored(tile, to, 4 * SIDE); \
    } while (0)

// Add to the sums of a tile of x, [output, row], those of `groups` groups of a panel, each times its scale. While a group is scaled, tiles multiply the next one.
TILED INLINE void add_groups(const Panel *panel, const Stored how, const uint16_t *x, const float *of_x, float *sums, const int groups, const int steps, const int tiles) {
    float parts[2][SIDE * SIDE] __attribute__((aligned(64)));
    const uint16_t *values = panel->values[0];
    __m512 sum[SIDE];
#pragma GCC unroll 16
    for (int output = 0; output < SIDE; output++) sum[output] = _mm512_load_ps(sums + output * SIDE);
    MULTIPLY_GROUP(0, 4, 6, parts[0]);
    for (int group = 0; group < groups; group++, of_x += tiles * SIDE) {
        if (group + 1 < groups) {
            if (group % 2) MULTIPLY_GROUP(0, 4, 6, parts[0]);
            else MULTIPLY_GROUP(1, 5, 7, parts[1]);
        }
        order_memory();
        const float *part = parts[group % 2];
        const __m512 sum_of_x = has_sums(how) ? _mm512_loadu_ps(of_x) : _mm512_setzero_ps();
#pragma GCC unroll 16
        for (int output = 0; output < SIDE; output++) {
            sum[output] = _mm512_fmadd_ps(_mm512_load_ps(part + output * SIDE), _mm512_set1_ps(panel->scales[output][group]), sum[output]);
            if (has_sums(how)) sum[output] = _mm512_fmadd_ps(sum_of_x, _mm512_set1_ps(panel->offsets[output][group]), sum[output]);
        }
    }
#pragma GCC unroll 16
    for (int output = 0; output < SIDE; output++) _mm512_store_ps(sums + output * SIDE, sum[output]);
}
#undef MULTIPLY_GROUP

// `there` outputs from `at` on by quantised values as they are, or by what they stand for; `how`, `by_scales` and `tiles` are constants wherever this is inlined.
TILED INLINE void tile_block(const QuantizedTiles *given, const Stored how, const bool by_scales, const __m512i *table, Py_ssize_t at, int there, Panel *panel, float *sums,
                              const int tiles) {
    const Quantized *p = &given->weight;
    const Py_ssize_t columns = p->columns;
    const int size = !is_grouped(how) || !by_scales ? 0 : in_blocks(how) ? 32 : 1 << p->shift;
    if (size) memset(sums, 0, (size_t)tiles * SIDE * SIDE * sizeof *sums);
    else zero_tiles(tiles);
    for (Py_ssize_t begin = 0; begin < columns; begin += PANEL) {
        const int count = columns - begin < PANEL ? (int)(columns - begin) : PANEL;
        for (int output = 0; output < there; output++) {
            uint16_t *to = panel->values[0] + output * LANES;
            float *scales = panel->scales[output], *offsets = panel->offsets[output];
            fetch_next(p, how, at + output + SIDE, begin, count);
            if (!by_scales) round_spread(p, how, at + output, begin, begin + count, to, TILE);
            else if (in_blocks(how)) decode_blocks(p, how, table, at + output, begin, count, to, scales, offsets);
            else decode_columns(p, how, table, at + output, begin, count, to);
            if (by_scales && size && !in_blocks(how)) scales_of_columns(p, how, at + output, begin >> p->shift, scales, offsets);
        }
        order_memory();
        const uint16_t *x = given->packed + begin / LANES * tiles * TILE;
        if (!size)
            for (int step = 0; step * LANES < count; step++) multiply_step(panel->values[step], LANES, x + step * tiles * TILE, tiles);
        for (int tile = 0; size && tile < tiles; tile++)
            add_groups(panel, how, x + tile * TILE, given->sums + (begin / size * tiles + tile) * SIDE, sums + tile * SIDE * SIDE, count / size, size / LANES, tiles);
    }
    if (size) return;
    store_tiles(sums, tiles);
    order_memory();
    if (is_grouped(how)) return;
    const Floats scales = scales_there(p->scales, p->kind, at, first_lanes(there));
    for (int output = 0; output < there; output++)
        for (int i = output * SIDE; i < tiles * SIDE * SIDE; i += SIDE * SIDE) store(sums + i, floats(sums + i) * all(scales[output]));
}

// What tiles hold for quantised values.
TILED INLINE void set_table(const Quantized *p, const Stored how, __m512i *table) {
    static const uint16_t numbers[32] = {
        0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
        0x4180, 0x4188, 0x4190, 0x4198, 0x41A0, 0x41A8, 0x41B0, 0x41B8, 0x41C0, 0x41C8, 0x41D0, 0x41D8, 0x41E0, 0x41E8, 0x41F0, 0x41F8,
    };
    for (int i = 0; i < 4; i++)
        table[i] = how == Q4_K ? _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)numbers))
            : how == Q5_K ? _mm512_loadu_si512(numbers)
            : is_float8(how) ? _mm512_loadu_si512(float8_values + LANES * i)
            : constants(p, how).table[0];
}

TILED INLINE void tile_outputs(const QuantizedTiles *given, const Stored how, Py_ssize_t at, Py_ssize_t end) {
    const struct multiply_quantized *n = given->n;
    const Product p = {.bias = n->bias, .added = n->added, .y = n->y, .rows = n->rows, .columns = n->columns, .outputs = n->outputs, .is_wide = n->is_wide != 0, .activation = NOTHING};
    const bool by_scales = is_scaled(how, given->weight.shift);
    float sums[MOST_TILES * SIDE * SIDE] __attribute__((aligned(64)));
    Panel panel;
    memset(&panel, 0, sizeof panel);
    __m512i table[4];
    set_table(&given->weight, how, table);
    use_whole_tiles();
    for (; at < end; at += SIDE) {
        const int there = end - at < SIDE ? (int)(end - at) : SIDE;
        switch ((n->rows + SIDE - 1) / SIDE) {
#define TILES(tiles) \
    if (by_scales) tile_block(given, how, true, table, at, there, &panel, sums, tiles); \
    else tile_block(given, how, false, table, at, there, &panel, sums, tiles)
            case 1: TILES(1); break;
            case 2: TILES(2); break;
            case 3: TILES(3); break;
            default: TILES(4);
#undef TILES
        }
        finish_tiles(&p, sums, NULL, at, there, false);
    }
    _tile_release();
}

#define OUTPUTS(how) \
    TILED static void tile_outputs_##how(const void *given, Py_ssize_t at, Py_ssize_t end) { tile_outputs(given, how, at, end); }
OUTPUTS(INT8) OUTPUTS(INT8_GROUPS) OUTPUTS(FLOAT8) OUTPUTS(FLOAT8_GROUPS) OUTPUTS(INT4_GROUPS) OUTPUTS(UINT4_GROUPS) OUTPUTS(VALUES4) OUTPUTS(Q4_K) OUTPUTS(Q5_K) OUTPUTS(Q6_K)
#undef OUTPUTS

static const Share tile_shares[] = {tile_outputs_INT8, tile_outputs_INT8_GROUPS, tile_outputs_FLOAT8, tile_outputs_FLOAT8_GROUPS, tile_outputs_INT4_GROUPS,
                                    tile_outputs_UINT4_GROUPS, tile_outputs_VALUES4, tile_outputs_Q4_K, tile_outputs_Q5_K, tile_outputs_Q6_K};

// The sums of x over groups of `size` columns, by a tile of ones.
TILED static void sum_by_tiles(const uint16_t *packed, float *to, Py_ssize_t groups, Py_ssize_t size, Py_ssize_t tiles) {
    uint16_t ones[TILE] __attribute__((aligned(64)));
    float sums[SIDE * SIDE] __attribute__((aligned(64)));
    for (int i = 0; i < TILE; i++) ones[i] = 0x3F80;
    use_whole_tiles();
    order_memory();
    _tile_loadd(4, ones, 2 * LANES);
    for (Py_ssize_t group = 0; group < groups; group++)
        for (Py_ssize_t tile = 0; tile < tiles; tile++, to += SIDE) {
            _tile_zero(0);
            for (Py_ssize_t step = group * size / LANES; step < (group + 1) * size / LANES; step++) {
                _tile_loadd(5, packed + (step * tiles + tile) * TILE, 2 * LANES);
                _tile_dpbf16ps(0, 4, 5);
            }
            _tile_stored(0, sums, 4 * SIDE);
            order_memory();
            memcpy(to, sums, SIDE * sizeof *sums);
        }
    _tile_release();
}

// Whether tiles multiply all rows of x in less time than pairs, and may: where quantised values are less than they stand for there, sums of what is not finite, or near the largest number, say nothing.
static bool takes_tiles(const struct multiply_quantized *n) {
    const Stored how = (Stored)n->stored;
    const int least = !is_scaled(how, shift_of(n->columns, n->groups)) ? 6 : how < INT4_GROUPS ? 5 : 4;
    return n->rows >= least && n->rows <= MOST_TILES * SIDE && has_tiles() && (!has_sums(how) || are_usual(n->x, n->rows * n->columns));
}

static void multiply_quantized_by_tiles(const struct multiply_quantized *n) {
    const Stored how = (Stored)n->stored;
    const Product p = {.x = n->x, .rows = n->rows, .columns = n->columns};
    const Py_ssize_t tiles = (n->rows + SIDE - 1) / SIDE, groups = in_blocks(how) ? n->columns / 32 : n->groups;
    float *sums = (float *)pack_for_tiles(&p, is_spread(how), n->work);
    if (has_sums(how)) sum_by_tiles(n->work, sums, groups, n->columns / (groups + !groups), tiles);
    const QuantizedTiles given = {.n = n, .weight = WEIGHT_OF(n, n->outputs), .packed = n->work, .sums = sums};
    const Py_ssize_t bytes = given.weight.bytes;
    const unsigned threads = n->outputs * bytes < SMALL_QUANTIZED ? 1 : (unsigned)n->threads;
    in_shares(tile_shares[n->stored], &given, n->outputs, (QUANTIZED_SHARE / (bytes + 1) / SIDE + 1) * SIDE, threads);
}
