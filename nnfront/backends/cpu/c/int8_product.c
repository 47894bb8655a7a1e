// SPDX-License-Identifier: Apache-2.0
// Products of x, rounded to 8 bits a row, with a weight in integers of 8 or 4 bits: sums of integers, which processors make several times as fast as sums of floats.
//
// A row of x becomes the integers nearest to x / scale, where its largest element is 127. Weights become integers from 0, the offset of which is taken from sums of x: so zero points
// cost nothing. CHUNK columns of OF_PANEL outputs at a time are brought into the order in which one instruction multiplies four neighbours of each output, and meet all rows there. A packed
// weight lies in that order, four bytes of each of OF_PANEL outputs after one another, and meets rows as it lies unless they are many (`packed_product.h`); matrix tiles multiply 16 rows at a
// time (`int8_tiles.h`).
// In pairs, where sums have 16 bits, four bits of a weight are multiplied with bytes of x, bytes by their sizes with bytes of x that take their signs, and bytes that are brought into order with
// words of x. Sums of a part are exact, and parts are added in their order: so a row has the same bits in all ways.
// Weights in blocks, which have all of their factors inside, have a way of their own (`int8_blocks.h`).

#include <math.h>

#include "activation.h"
#include "blocks.h"

// Rows of x that are multiplied at once: as many sums as there are registers for.
#if REGISTERS == 32 || BYTES_BY_FOURS
#define IN_BLOCK 12
#else
#define IN_BLOCK 4
#endif

enum {
// Rows that meet a packed weight as it lies where bytes are multiplied by fours, and whether all meet one in 8 bits; in pairs all rows do.
#if AVX512
    MOST_AS_IT_LIES = 8 * IN_BLOCK, ALL_MEET_BYTES_AS_THEY_LIE = true,
#else
    MOST_AS_IT_LIES = 4 * IN_BLOCK, ALL_MEET_BYTES_AS_THEY_LIE = false,
#endif
    AHEAD_OF_PACKED = 4 << 10,          // bytes of it that are fetched before they are needed
    AHEAD_OF_SCALES = 256,              // the same of scales
    MEMORY_BOUND_ROWS = 4,              // rows that take about as long as memory does to give a weight
    CHUNK = 512,                        // columns; their sums of products are exact in floats
    NEAR_BLOCKS = 44, NEAR_ROWS = NEAR_BLOCKS * IN_BLOCK,  // rows whose sums stay in a near cache
    WORDS_AT_ONCE = 4,                  // of which a group has a multiple
    IN_WORDS = 32,                      // columns of four bits whose sums of products are exact in 16 bits
    FOUR = 4,
    STEP = 16,  // columns that are rounded at a time
    OF_TILE = 16,  // rows, and fours of columns, of a tile
    OF_PANEL = 16, // outputs of a packed weight that lie together
    IN_PANEL = OF_PANEL / FLOATS,
    SUMS_AT_ONCE = REGISTERS / 2,  // vectors of them, beside which registers have room for what they are made of
#if AVX512 || AVX2 || NEON
    LEAST_INVERTED = 10 << 7,  // bfloat16 from which on a row is divided by multiplications: what they lack is a float with all its bits
#else
    LEAST_INVERTED = 1 << 15,
#endif
#if BYTES_BY_FOURS && NEON || BYTES_BY_PAIRS
    BYTES_MORE = 0,  // a weight's bytes are multiplied as they are
#else
    BYTES_MORE = 128,  // what a weight in bytes is multiplied as is more than it
#endif
    IN_BLOCK_ALONE = REGISTERS == 32 && IN_BLOCK == 12 ? 16 : IN_BLOCK,  // rows of a block that meet a packed weight without groups, where there are no more
    SUMS_IN_STREAMS = REGISTERS == 32 && !BYTES_BY_PAIRS ? 24 : SUMS_AT_ONCE,  // the same where nothing is made of what is read
    SUMS_OF_BLOCK = IN_PANEL * (int)IN_BLOCK_ALONE > (int)SUMS_IN_STREAMS ? IN_PANEL * (int)IN_BLOCK_ALONE : (int)SUMS_IN_STREAMS,  // vectors of them that are made at once
    BLOCK_OF_X = BLOCK + FACTORS * FOUR,  // bytes of a row that meet a block: integers, and what sums of groups are multiplied as
};

typedef int8_t Rounded;

typedef uint8_t AllBytes OF(VECTOR);
typedef int16_t ShortInts OF(VECTOR);
typedef Bits Arranged[CHUNK / FOUR * (1 + BYTES_BY_PAIRS)];  // columns of a chunk of a vector of outputs, in order

// What lies of a panel of a packed weight from a column on: words of four bytes of each output, scales and zero points of each part. Of a weight in order the words alone.
typedef struct {
    const uint8_t *words, *scales, *zeros;
} PackedPanel;

// Outputs that fill no panel, brought into one.
typedef struct {
    uint8_t words[CHUNK * OF_PANEL], scales[CHUNK / 32 * OF_PANEL * 4], zeros[CHUNK / 32 * OF_PANEL];
} MadePanel;

typedef struct {
    const struct multiply_integers *n;
    float *scales;             // [rows]
    float *sums;               // of each block of rows [parts, rows], of quantised values; for tiles where there are zero points alone
    int32_t *begins;           // in their place where integers of all outputs are one number more than the weight's: what sums of products begin with, so that they need not be mended
    Rounded *quantized;        // of each block of rows [columns / 4, rows, 4], or elements that are not rounded (`packed_product.h`); for blocks of each row [columns / BLOCK, BLOCK_OF_X]; for tiles [rows / 16, columns / 64, 16, 64]
    Py_ssize_t padded, length, parts;  // columns with what fills them up; of a part, which is a group or CHUNK; how many there are
    Py_ssize_t next;           // quantised values from a row to the next one where rows lie one after the other
    Py_ssize_t blocks;         // of rows, which are multiplied at a time
    Py_ssize_t bytes, outputs; // of an output of the weight; of those, twice those of y where there are gates
    bool is_tiled;
    bool in_words;             // whether quantised values are words, the first and third of four neighbours ahead of the others: they are multiplied with words of a weight
} Int8;

// The first row of a block: all have about as many, or for tiles OF_TILE.
INLINE Py_ssize_t first_of_block(const Int8 *p, Py_ssize_t block) { return p->is_tiled ? block * OF_TILE : p->n->rows * block / p->blocks; }

// The column of a quantised value among eight: four neighbours for bytes; of four bits, of which two are in a byte, the low halves and then the high ones.
INLINE int column_of_number(bool is_four_bits, int number) {
    return is_four_bits ? 2 * (number % FOUR) + number / FOUR : number;
}

// Where four neighbours of a row lie among those of tiles, which are rows of as many fours.
INLINE Py_ssize_t place_in_tile(Py_ssize_t four, Py_ssize_t row) { return (four / OF_TILE * OF_TILE + row) * OF_TILE + four % OF_TILE; }

// Where 16 columns from one on, a multiple of that, lie in a block of a row.
INLINE Py_ssize_t place_in_block(const Stored how, Py_ssize_t column) {
    const Py_ssize_t half = column / HALF, in_half = column % HALF;
    const Py_ssize_t is_high = has_minima(how) ? in_half / 32 % 2 : in_half / 64, byte = has_minima(how) ? in_half / 64 * 32 + in_half % 32 : in_half % 64;
    return ((half * IN_HALF + byte / VECTOR) * 2 + is_high) * VECTOR + byte % VECTOR;
}

// Write what the sum of a group of a row is multiplied as behind a block of the row: a float with minima, else a number that takes 32 from each quantised value, half of it twice where
// neighbours are multiplied.
INLINE void store_sum_of_group(const Stored how, int32_t sum, Rounded *behind, Py_ssize_t group) {
#if AVX512 || AVX2
    const int16_t half = (int16_t)(-16 * sum), less[2] = {half, half};
#else
    const int32_t less[1] = {-32 * sum};
#endif
    const float whole = (float)sum;
    if (has_minima(how)) memset(behind + group * FOUR, 0, FOUR), memcpy(behind + (FACTORS / 2 + group) * FOUR, &whole, FOUR);
    else memcpy(behind + group * FOUR, less, FOUR);
}

// What integers of a weight are more than the weight's, where that is the same for all outputs.
INLINE int one_offset(const struct multiply_integers *n) { return n->stored == INT4_GROUPS ? 8 : BYTES_MORE; }

INLINE Py_ssize_t bytes_of_rounded(const Int8 *p) { return 1 + p->in_words; }

INLINE bool is_gated(const struct multiply_integers *n) { return n->gate != NOTHING; }

// Whether sums of products begin in 16 bits: half of what is taken from a part of 32 columns in each of two, in which these sums stay below 2^15.
INLINE bool begins_in_words(const Int8 *p) { return BYTES_BY_PAIRS && p->n->stored == INT4_GROUPS && p->length == IN_WORDS; }

INLINE bool has_one_offset(const Int8 *p) { return p->n->stored != UINT4_GROUPS; }

// STEP quantised values, as they meet the weight.
FAST INLINE void in_order(const Ints *quantized, const bool is_four_bits, Rounded *to) {
#if AVX512
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)*quantized), order = _mm_set_epi8(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0);
    _mm_storeu_si128((__m128i *)to, is_four_bits ? _mm_shuffle_epi8(bytes, order) : bytes);
#else
    int32_t numbers[STEP];
    memcpy(numbers, quantized, sizeof numbers);
#pragma GCC unroll 16
    for (int i = 0; i < STEP; i++) to[i] = (Rounded)numbers[i / 8 * 8 + column_of_number(is_four_bits, i % 8)];
#endif
}

// Round row number `at` of a block of `rows`, of which the first one is row `first_row`.
FAST INLINE void round_row(const Int8 *p, const bool is_four_bits, Py_ssize_t first_row, Py_ssize_t rows, Py_ssize_t at) {
    const Py_ssize_t columns = p->n->columns, padded = p->padded, length = p->length, of_sums = first_row * p->parts + at;  // and `rows` behind it of each further part
    const bool is_tiled = p->is_tiled, in_words = p->in_words;
    const uint16_t *x = (const uint16_t *)p->n->x + (first_row + at) * columns;
    Rounded *to = p->quantized + first_row * p->next;
    uint16_t most = 0;
    for (Py_ssize_t i = 0; i < columns; i++) {
        const uint16_t size = x[i] & 0x7FFF;
        most = size > most ? size : most;
    }
    const bool is_finite = most < 0x7F80, is_divided = most < LEAST_INVERTED;
    const bool is_summed = !is_tiled || !has_one_offset(p);
    const Stored how = (Stored)p->n->stored;
    const float scale = !is_finite ? NAN : most ? widened(most) / 127.0f : 1.0f, inverse = 1.0f / scale;
    p->scales[first_row + at] = scale;
    for (Py_ssize_t part = 0, first = 0; first < padded; part++) {
        const Py_ssize_t end = is_summed && first + length < padded ? first + length : padded;
        Ints sum = {0};
        for (; first < end; first += STEP) {
            Ints quantized[STEP / FLOATS];
#pragma GCC unroll 4
            for (int i = 0; i < STEP / FLOATS; i++) {
                const Py_ssize_t left = columns - first - i * FLOATS;
                const Floats values = widened_vector(x + first + i * FLOATS, first_lanes(left > 0 ? left : 0)), near = values * all(inverse);
                // What is left of a division and times the inverse is what its result lacks: so it is rounded as a division is.
                const Floats quotients = is_divided ? values / all(scale) : fused(fused(all(-scale), near, values), all(inverse), near);
                quantized[i] = __builtin_convertvector(is_finite ? nearest(quotients) : all(0.0f), Ints);
                sum += quantized[i];
            }
            Rounded ordered[STEP];
            in_order(quantized, is_four_bits, ordered);
            if (in_blocks(how)) {
                memcpy(to + first / BLOCK * BLOCK_OF_X + place_in_block(how, first % BLOCK), ordered, sizeof ordered);
                continue;
            }
            if (is_tiled) {
                memcpy(to + place_in_tile(first / FOUR, at) * FOUR, ordered, sizeof ordered);
                continue;
            }
            for (int four = 0; four < STEP / FOUR; four++) {
                const Py_ssize_t place = (first / FOUR + four) * rows + at;
                const Rounded *of = ordered + four * FOUR;
                const int16_t words[FOUR] = {of[0], of[2], of[1], of[3]};
                if (in_words) memcpy(to + place * (Py_ssize_t)sizeof words, words, sizeof words);
                else memcpy(to + place * FOUR, of, FOUR);
            }
        }
        const int32_t all_of = in_total(sum);
        if (in_blocks(how)) store_sum_of_group(how, all_of, to + (first - 1) / BLOCK * BLOCK_OF_X + BLOCK, part % (BLOCK / length));
        else if (!is_summed || part >= p->parts) continue;
        else if (!has_one_offset(p)) p->sums[of_sums + part * rows] = (float)all_of;
        else if (begins_in_words(p)) p->begins[of_sums + part * rows] = (int32_t)((uint32_t)(-one_offset(p->n) / 2 * all_of & 0xFFFF) * 0x10001);
        else p->begins[of_sums + part * rows] = -one_offset(p->n) * all_of;
    }
}

FAST static void round_blocks(const void *given, Py_ssize_t block, Py_ssize_t end) {
    const Int8 *p = given;
    const bool are_four_bits = p->n->stored == INT4_GROUPS || p->n->stored == UINT4_GROUPS;
    for (; block < end; block++) {
        const Py_ssize_t first = first_of_block(p, block), rows = first_of_block(p, block + 1) - first;
        for (Py_ssize_t at = 0; at < rows && first + at < p->n->rows; at++)
            if (are_four_bits) round_row(p, true, first, rows, at);
            else round_row(p, false, first, rows, at);
    }
}

// What four quantised values of row `i` of a block, a constant, and four bytes of each output add to sums.
FAST INLINE Ints plus_products(Ints sum, Bits weight, const Rounded *x, const int i) {
#if BYTES_BY_FOURS && NEON
    const int8x16_t rows = vld1q_s8(x + i / 4 * 16);  // of four rows, by numbers of which vectors are multiplied; behind the last one there may be others
    switch (i % 4) {
        case 0: return (Ints)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)weight, rows, 0);
        case 1: return (Ints)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)weight, rows, 1);
        case 2: return (Ints)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)weight, rows, 2);
        default: return (Ints)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)weight, rows, 3);
    }
#elif BYTES_BY_FOURS
    int32_t four;
    memcpy(&four, x + FOUR * i, sizeof four);
    return plus_fours(sum, weight, (Bits)(four - (Ints){0}));
#else
    int16_t words[FOUR];
    memcpy(words, x + (Py_ssize_t)sizeof words * i, sizeof words);
    sum += (Ints)(weight & 255) * words[0] + (Ints)(weight >> 16 & 255) * words[1];
    return sum + (Ints)(weight >> 8 & 255) * words[2] + (Ints)(weight >> 24) * words[3];
#endif
}

// The output of a lane of a vector of outputs from `at` on; the last one again where there are fewer.
FAST INLINE Py_ssize_t output_of(const Int8 *p, Py_ssize_t at, int lane) { return at + lane < p->outputs ? at + lane : p->outputs - 1; }

// Whether a vector of outputs from `at` on lies in a panel: those of a packed weight that fill none lie behind, one after the other.
INLINE bool lies_in_panel(const Int8 *p, Py_ssize_t at) { return p->n->is_packed && at < p->outputs / OF_PANEL * OF_PANEL; }

// Four bytes of each of FLOATS outputs from `at` on in a packed weight; the next four lie OF_PANEL times four bytes behind.
INLINE const uint8_t *packed_words(const Int8 *p, Py_ssize_t at, Py_ssize_t byte) {
    return (const uint8_t *)p->n->quantized + at / OF_PANEL * OF_PANEL * p->bytes + byte * OF_PANEL + at % OF_PANEL * FOUR;
}

// Four bytes of each of FLOATS outputs as what is multiplied: integers from 0, or for tiles those of the weight; of four bits the low ones and then the high ones. Bytes that are multiplied
// in pairs become words, the first and third of four neighbours and then the others. Returns the place behind.
FAST INLINE Bits *as_integers(const Int8 *p, const Bits found, Bits *to) {
    const Stored how = (Stored)p->n->stored;
    if (how < INT4_GROUPS) {
#if BYTES_BY_PAIRS
        *to++ = (Bits)((ShortInts)(found << 8) >> 8);
        *to++ = (Bits)((ShortInts)found >> 8);
#else
        *to++ = found ^ (p->is_tiled ? 0 : BYTES_MORE * 0x01010101u);
#endif
        return to;
    }
    const uint32_t flipped = how == INT4_GROUPS ? 0x08080808 : 0;
    const AllBytes less = (uint8_t)(p->is_tiled && how == INT4_GROUPS ? 8 : 0) - (AllBytes){0};
    *to++ = (Bits)((AllBytes)((found & 0x0F0F0F0F) ^ flipped) - less);
    *to++ = (Bits)((AllBytes)((found >> 4 & 0x0F0F0F0F) ^ flipped) - less);
    return to;
}

// Columns `first` to `end` of FLOATS outputs from `at` on, four neighbours of each output together; behind `end` to a multiple of VECTOR bytes where the weight is not packed.
FAST INLINE void arrange_chunk(const Int8 *p, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, Bits *to) {
    const Stored how = (Stored)p->n->stored;
    const Py_ssize_t bytes = p->bytes;
    const bool in_panel = lies_in_panel(p, at);
    const uint8_t *packed = packed_words(p, at, bytes_of(how, first)), *behind = packed_words(p, at, bytes_of(how, end));
    for (; in_panel && packed < behind; packed += OF_PANEL * FOUR) {
        fetch(packed + AHEAD_OF_PACKED);
        to = as_integers(p, (Bits)floats(packed), to);
    }
    for (Py_ssize_t byte = bytes_of(how, first); !in_panel && byte < bytes_of(how, end); byte += VECTOR) {
        Bits of[FLOATS];
#pragma GCC unroll 16
        for (int lane = 0; lane < FLOATS; lane++) {
            const uint8_t *from = (const uint8_t *)p->n->quantized + output_of(p, at, lane) * bytes + byte;
            fetch((const uint8_t *)p->n->quantized + (at + FLOATS) * bytes + byte * FLOATS + lane * VECTOR);  // of the next vector of outputs, in the order of memory
            of[lane] = some_bytes(from, bytes - byte);
        }
        transpose(of);
        for (int i = 0; i < FLOATS; i++) to = as_integers(p, of[i], to);
    }
}

INLINE Py_ssize_t bytes_of_scale(const Int8 *p) { return (Py_ssize_t)1 << scale_bytes_log2((Scales)p->n->scale_kind); }

// The part of a column among scales; there is one scale of all columns of an output where there are no groups.
INLINE Py_ssize_t part_of(const Int8 *p, Py_ssize_t column) { return p->n->stored == INT8 ? 0 : column / p->length; }

// The panel of the outputs from `at` on, from a column on.
FAST INLINE PackedPanel panel_of(const Int8 *p, Py_ssize_t at, Py_ssize_t first) {
    const Py_ssize_t place = at * p->n->groups + part_of(p, first) * OF_PANEL;
    const uint8_t *scales = p->n->scales, *zeros = p->n->zeros;
    return (PackedPanel){packed_words(p, at, bytes_of((Stored)p->n->stored, first)), scales + place * bytes_of_scale(p), zeros ? zeros + place : NULL};
}

// The same of the last outputs, which fill no panel, for the columns `first` to `end`.
FAST static PackedPanel made_panel(const Int8 *p, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, MadePanel *to) {
    const struct multiply_integers *n = p->n;
    const Py_ssize_t from = bytes_of((Stored)n->stored, first), behind = bytes_of((Stored)n->stored, end), scale = bytes_of_scale(p), part = part_of(p, first), parts = part_of(p, end - 1) + 1 - part;
    for (int lane = 0; lane < OF_PANEL; lane++) {
        const Py_ssize_t output = output_of(p, at, lane), group = output * n->groups + part;
        for (Py_ssize_t byte = from; byte < behind; byte += FOUR) memcpy(to->words + (byte - from) * OF_PANEL + lane * FOUR, (const uint8_t *)n->quantized + output * p->bytes + byte, FOUR);
        for (Py_ssize_t i = 0; i < parts; i++) {
            memcpy(to->scales + (i * OF_PANEL + lane) * scale, (const uint8_t *)n->scales + (group + i) * scale, (size_t)scale);
            if (!has_one_offset(p)) to->zeros[i * OF_PANEL + lane] = ((const uint8_t *)n->zeros)[group + i];
        }
    }
    return (PackedPanel){to->words, to->scales, to->zeros};
}

// Bytes of a panel that are fetched before they are needed: of several panels that few rows meet, those that are next.
INLINE int ahead_of(const int rows, const int vectors) { return rows <= MEMORY_BOUND_ROWS && vectors > IN_PANEL ? (int)AHEAD_OF_STREAM : (int)AHEAD_OF_PACKED; }

// The scales of a part of vector `v` of a panel.
FAST INLINE Floats panel_scales(const Int8 *p, const PackedPanel *panel, Py_ssize_t part, int v) {
    const Py_ssize_t place = part * OF_PANEL + v * FLOATS;
    fetch(panel->scales + place * bytes_of_scale(p) + AHEAD_OF_SCALES);
    return elements(panel->scales, p->n->scale_kind == FLOAT_SCALES, place, first_lanes(FLOATS));
}

FAST INLINE Floats panel_zeros(const PackedPanel *panel, Py_ssize_t part, int v) {
    return __builtin_convertvector(bytes_there(panel->zeros + part * OF_PANEL + v * FLOATS, first_lanes(FLOATS)), Floats);
}

// For each part of the columns `first` to `end` the scales of FLOATS outputs, and their zero points where there are any; of a weight that is not packed up to a multiple of FLOATS parts.
FAST INLINE void factors_of_parts(const Int8 *p, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, Floats *scales, Floats *zeros) {
    const struct multiply_integers *n = p->n;
    const Py_ssize_t part = part_of(p, first), parts = part_of(p, end - 1) + 1 - part;
    const bool has_zeros = !has_one_offset(p);
    if (lies_in_panel(p, at)) {
        const PackedPanel panel = panel_of(p, at - at % OF_PANEL, first);
        const int v = (int)(at % OF_PANEL / FLOATS);
        for (Py_ssize_t i = 0; i < parts; i++) {
            scales[i] = panel_scales(p, &panel, i, v);
            if (has_zeros) zeros[i] = panel_zeros(&panel, i, v);
        }
        return;
    }
    for (Py_ssize_t i = 0; i < parts; i += FLOATS) {
        Bits of[FLOATS], points[FLOATS];  // those alone where there are zero points
        for (int lane = 0; lane < FLOATS; lane++) {
            const Py_ssize_t place = output_of(p, at, lane) * n->groups + part + i;
            const Lanes there = first_lanes(n->groups - part - i);
            of[lane] = (Bits)elements(n->scales, n->scale_kind == FLOAT_SCALES, place, there);
            if (has_zeros) points[lane] = bytes_there((const uint8_t *)n->zeros + place, there);
        }
        transpose(of);
        if (has_zeros) transpose(points);
        for (int j = 0; j < FLOATS; j++) {
            scales[i + j] = (Floats)of[j];
            if (has_zeros) zeros[i + j] = __builtin_convertvector(points[j], Floats);
        }
    }
}

// The bytes of a word of all outputs that are multiplied with it at once, packed or in order.
INLINE Py_ssize_t bytes_of_word(const bool is_packed) { return is_packed ? OF_PANEL * FOUR : (1 + BYTES_BY_PAIRS) * VECTOR; }

// Add to the products of `rows` rows and `vectors` vectors of outputs, `next` bytes apart in each of some panels, those of `count` words of four bytes of each output: each of `halves` numbers, or if they are in order one number a word.
// The constants are so wherever this is inlined.
#if BYTES_BY_PAIRS
// Four bits are multiplied in pairs, whose sums of IN_WORDS columns are exact in 16 bits; of parts that are no longer products begin with them. Bytes that are in order are words.
FAST INLINE void add_words(Ints (*products)[SUMS_OF_BLOCK], const PackedPanel *panels, Py_ssize_t at, Py_ssize_t next, const Rounded *x, Py_ssize_t count, uint32_t flipped, const bool is_packed,
                           const int halves, const int rows, const int vectors, const bool is_short) {
    enum { WORDS = IN_WORDS / (2 * FOUR) };
    const bool are_halves = halves == 2, are_words = !are_halves && !is_packed;
    const int all_of = rows * vectors;
    for (const Py_ssize_t each = are_halves ? (Py_ssize_t)WORDS : count; count > 0; count -= each) {
        Words sums[SUMS_OF_BLOCK];
#pragma GCC unroll 24
        for (int i = 0; i < all_of && are_halves; i++) sums[i] = is_short ? (Words)products[0][i] : (Words){0};
#pragma GCC unroll 1
        for (const Py_ssize_t behind = at + (count < each ? count : each) * bytes_of_word(is_packed); at < behind; at += bytes_of_word(is_packed)) {
            for (int v = 0; v < vectors && is_packed; v += IN_PANEL) fetch(panels[v / IN_PANEL].words + at + ahead_of(rows, vectors));
#pragma GCC unroll 4
            for (int begin = 0; begin < vectors; begin += IN_PANEL) {
                Bits of[IN_PANEL][2];  // of each vector of outputs what is multiplied
                const int next_to = vectors < IN_PANEL ? vectors : (int)IN_PANEL;
#pragma GCC unroll 2
                for (int v = 0; v < next_to; v++) {
                    const uint8_t *weight = panels[begin / IN_PANEL].words + at + v * next;
                    const Bits found = (Bits)floats(weight) ^ flipped;
                    of[v][0] = are_halves && is_packed ? found & 0x0F0F0F0F : found;
                    of[v][1] = is_packed ? found >> 4 & 0x0F0F0F0F : (Bits)floats(weight + VECTOR);
                    if (are_words && rows > 1) __asm__("" : "+x"(of[v][0]), "+x"(of[v][1]));  // loaded once: compilers would load them again for each row
                }
#pragma GCC unroll 16
                for (int row = 0; row < rows; row++) {
                    int32_t four[2];
                    memcpy(four, x + FOUR * (are_words ? 2 * row : row), FOUR);
                    memcpy(four + 1, x + FOUR * (are_words ? 2 * row + 1 : (halves - 1) * rows + row), FOUR);
                    const Bits with[2] = {(Bits)(four[0] - (Ints){0}), (Bits)(four[1] - (Ints){0})};
#pragma GCC unroll 2
                    for (int v = 0; v < next_to; v++) {
                        const int i = (begin + v) * rows + row;
                        if (are_words) products[0][i] = plus_neighbours(plus_neighbours(products[0][i], (Words)of[v][0], (Words)with[0]), (Words)of[v][1], (Words)with[1]);
                        else if (are_halves) sums[i] = plus_pairs(plus_pairs(sums[i], of[v][0], with[0]), of[v][1], with[1]);
                        else products[0][i] = plus_fours(products[0][i], of[v][0], with[0]);
                    }
                }
            }
            x += FOUR * rows * (are_words ? 2 : halves);
        }
#pragma GCC unroll 24
        for (int i = 0; i < all_of && are_halves; i++) products[0][i] = plus_neighbours(is_short ? (Ints){0} : products[0][i], sums[i], in_all(1));
    }
}
#else
// Sums of few rows are two each, as they would wait for one another.
FAST INLINE void add_words(Ints (*products)[SUMS_OF_BLOCK], const PackedPanel *panels, Py_ssize_t at, Py_ssize_t next, const Rounded *x, Py_ssize_t count, uint32_t flipped, const bool is_packed,
                           const int halves, const int rows, const int vectors, const bool is_short) {
    const bool are_two = is_packed && rows * vectors <= 2;
    const int numbers = is_packed ? halves : 1;
    for (Py_ssize_t k = 0; k < count; k += WORDS_AT_ONCE)
#pragma GCC unroll 4
        for (int word = 0; word < WORDS_AT_ONCE; word++, at += bytes_of_word(is_packed)) {
            if (word && k + word == count) break;
            for (int v = 0; v < vectors && is_packed; v += IN_PANEL) fetch(panels[v / IN_PANEL].words + at + ahead_of(rows, vectors));
#pragma GCC unroll 2
            for (int half = 0; half < numbers; half++, x += FOUR * rows * (BYTES_BY_FOURS ? 1 : 2))
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) {
                    const Bits found = (Bits)floats(panels[v / IN_PANEL].words + at + v % IN_PANEL * next), of = (numbers == 1 ? found : found >> 4 * half & 0x0F0F0F0F) ^ flipped;
                    Ints *sum = products[!are_two ? 0 : halves == 1 ? word % 2 : half] + v * rows;
#pragma GCC unroll 16
                    for (int i = 0; i < rows; i++) sum[i] = plus_products(sum[i], of, x, i);
                }
        }
}
#endif

// Where the sums of vector `i` of a block lie, of which those of all rows follow one another, among sums of panels [panel, row, output].
INLINE int place_of_vector(int i, const int rows) { return (i / rows / IN_PANEL * rows + i % rows) * OF_PANEL + i / rows % IN_PANEL * FLOATS; }

// What the columns `first` to `end` add to the sums of a block, [panel, row, output]: words of panels are in order, with `scales` and `offsets` of each vector of outputs, or they are packed in four
// bytes of each output, of `halves` numbers each. `vectors` of outputs, the first of which is number `begin_vector`, lie `next` bytes apart in each of some panels. The constants are so wherever this is inlined.
FAST INLINE void multiply_block(const Int8 *p, const PackedPanel *panels, const int begin_vector, Py_ssize_t next, const bool is_packed, const int halves, const Floats (*scales)[CHUNK / 32],
                                const Floats (*offsets)[CHUNK / 32], Py_ssize_t first, Py_ssize_t end, Py_ssize_t row, float *to, const bool has_offsets, const int rows, const int vectors, const bool is_short) {
    const int numbers = is_packed || BYTES_BY_PAIRS ? halves : 1, all_of = rows * vectors;  // numbers in a word
    const uint32_t flipped = !is_packed ? 0 : halves == 1 ? BYTES_MORE * 0x01010101u : has_offsets ? 0 : BYTES_BY_PAIRS ? 0x88888888 : 0x08080808;
    const Rounded *x = p->quantized + row * p->next + first * rows * bytes_of_rounded(p);
    Py_ssize_t of_sums = row * p->parts + first / p->length * rows, at = begin_vector * next;
    Floats sums[SUMS_OF_BLOCK];
    to += begin_vector * FLOATS;
#pragma GCC unroll 24
    for (int i = 0; i < all_of; i++) sums[i] = first ? floats(to + place_of_vector(i, rows)) : all(0.0f);
    for (Py_ssize_t begin = first, part = 0; begin < end; begin += p->length, part++, of_sums += rows) {
        const Py_ssize_t left = is_short ? (Py_ssize_t)IN_WORDS : end - begin < p->length ? end - begin : p->length, count = (left + numbers * FOUR - 1) / (numbers * FOUR);
        Ints products[2][SUMS_OF_BLOCK];
#pragma GCC unroll 24
        for (int i = 0; i < all_of; i++) {
            products[0][i] = (has_offsets ? 0 : p->begins[of_sums + i % rows]) - (Ints){0};
            products[1][i] = (Ints){0};
        }
        add_words(products, panels, at, next, x, count, flipped, is_packed, halves, rows, vectors, is_short);
        at += count * bytes_of_word(is_packed), x += count * numbers * FOUR * rows * bytes_of_rounded(p);
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            const int v = begin_vector + j, in_panel = v % IN_PANEL;
            const PackedPanel *panel = panels + v / IN_PANEL;
            const Floats scale = is_packed ? panel_scales(p, panel, p->n->stored == INT8 ? 0 : part, in_panel) : scales[v][part];
            const Floats offset = !has_offsets ? all(0.0f) : is_packed ? panel_zeros(panel, part, in_panel) : offsets[v][part];
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) {
                const int of = j * rows + i;
                Floats less = __builtin_convertvector(products[0][of] + products[1][of], Floats);
                if (has_offsets) less -= offset * all(p->sums[of_sums + i]);
                sums[of] = fused(less, scale, sums[of]);
            }
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < all_of; i++) store(to + place_of_vector(i, rows), sums[i]);
}

// Write a vector of outputs of some rows from their sums, `next` apart, and if they are gates those of what these are multiplied with.
FAST INLINE void finish_rows(const Int8 *p, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, const float *sums, const float *others, const int next) {
    const struct multiply_integers *n = p->n;
    const Lanes there = first_lanes(n->outputs - at);
    const uint16_t *biases = n->bias;
    const Floats bias = biases ? widened_vector(biases + at, there) : all(0.0f);
    const Floats other_bias = biases && is_gated(n) ? widened_vector(biases + n->outputs + at, there) : all(0.0f);
    for (Py_ssize_t row = first; row < end; row++, sums += next, others += next) {
        const Py_ssize_t to = row * n->outputs + at;
        const Floats scale = all(n->is_rounded ? p->scales[row] : 1.0f);
        Floats y = activated(fused(floats(sums), scale, bias), (Activation)n->gate);
        if (is_gated(n)) y *= fused(floats(others), scale, other_bias);
        if (n->added) y += widened_vector((const uint16_t *)n->added + to, there);
        store_elements(n->y, n->is_wide, to, there, y);
    }
}

// Makes the sums of the rows that there are and of the outputs that begin at `at`, some panels or vectors of them: [panel or vector, row, output].
typedef void StreamSums(const Int8 *p, const Py_ssize_t *at, float *sums);

// Write the outputs of all rows, which are few, by numbers of panels or vectors of `each` of them, of which `streams` are read at once if they are several; gates with what they are multiplied with.
// Returns the number of the first that is left. Not where there are tiles: this was not measured on a processor that has them.
FAST INLINE Py_ssize_t in_streams(const Int8 *p, const int streams, Py_ssize_t first, Py_ssize_t last, const int each, StreamSums *sums_of) {
    if (streams < 2 || has_tiles()) return first;
    const int halves = 1 + is_gated(p->n), together = streams / halves;
    const Py_ssize_t apart = (last - first) / together, of_stream = p->n->rows * each;
    for (const Py_ssize_t behind = first + apart; first < behind; first++) {
        Py_ssize_t at[STREAMS];
        float sums[(SUMS_IN_STREAMS > STREAMS ? (int)SUMS_IN_STREAMS : STREAMS) * OF_PANEL];
        for (int stream = 0; stream < streams; stream++) at[stream] = (first + stream / halves * apart) * each + stream % halves * p->n->outputs;
        sums_of(p, at, sums);
        for (int stream = 0; stream < streams; stream += halves)
            for (int lane = 0; lane < each && at[stream] + lane < p->n->outputs; lane += FLOATS)
                finish_rows(p, at[stream] + lane, 0, p->n->rows, sums + stream * of_stream + lane, sums + (stream + halves - 1) * of_stream + lane, each);
    }
    return first + (together - 1) * apart;
}

// Whether rows meet a packed weight as it lies.
INLINE bool lies_packed(const Int8 *p) {
    const Stored how = (Stored)p->n->stored;
    return p->n->is_packed && (!p->n->is_rounded || BYTES_BY_PAIRS || (ALL_MEET_BYTES_AS_THEY_LIE && how < INT4_GROUPS) || p->n->rows <= MOST_AS_IT_LIES);
}

#include "int8_blocks.h"

#include "packed_product.h"

#if HAS_TILES
#include "int8_tiles.h"
#endif

// Make the sums of OF_PANEL outputs from `at` on and of some blocks of rows, [row, output].
FAST INLINE void sum_arranged(const Int8 *p, Py_ssize_t at, Py_ssize_t block, Py_ssize_t last, float *sums) {
    Arranged weight[IN_PANEL];
    Floats scales[IN_PANEL][CHUNK / 32], offsets[IN_PANEL][CHUNK / 32];  // groups of 32 or more
    const PackedPanel in_order = {.words = (const uint8_t *)weight};
    const Py_ssize_t begin = first_of_block(p, block);
    const bool has_offsets = !has_one_offset(p), are_halves = BYTES_BY_PAIRS && p->n->stored >= INT4_GROUPS;
    for (Py_ssize_t first = 0; first < p->n->columns; first += CHUNK) {
        const Py_ssize_t end = least(first + CHUNK, p->n->columns);
        for (int v = 0; v < IN_PANEL; v++) {
            arrange_chunk(p, at + v * FLOATS, first, end, weight[v]);
            factors_of_parts(p, at + v * FLOATS, first, end, scales[v], offsets[v]);
        }
#define BLOCK(count, halves, has_offsets, is_short) \
        do { \
            const int vectors = count * IN_PANEL <= SUMS_AT_ONCE ? IN_PANEL : 1; \
            for (int v = 0; v < IN_PANEL; v += vectors) \
                multiply_block(p, &in_order, v, sizeof(Arranged), false, halves, scales, offsets, first, end, row, sums + (row - begin) * OF_PANEL, has_offsets, count, vectors, is_short); \
        } while (0)
#define ROWS(count) \
    case count: \
        if (count > IN_BLOCK) break; \
        else if (has_offsets) BLOCK(count, 2, true, false); \
        else if (begins_in_words(p)) BLOCK(count, 2, false, true); \
        else if (are_halves) BLOCK(count, 2, false, false); \
        else BLOCK(count, 1, false, false); \
        break;
        for (Py_ssize_t i = block; i < last; i++) {
            const Py_ssize_t row = first_of_block(p, i);
            switch (first_of_block(p, i + 1) - row) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) }
        }
#undef ROWS
#undef BLOCK
    }
}

// OF_PANEL outputs, by number.
FAST static void int8_outputs(const void *given, Py_ssize_t panel, Py_ssize_t last) {
    const Int8 *p = given;
    float sums[2][NEAR_ROWS * OF_PANEL];
    for (; panel < last; panel++)
        for (Py_ssize_t from = 0, behind; from < p->blocks; from = behind) {
            const Py_ssize_t at = panel * OF_PANEL;
            behind = least(from + NEAR_BLOCKS, p->blocks);
            for (int half = 0; half <= is_gated(p->n); half++) sum_arranged(p, half * p->n->outputs + at, from, behind, sums[half]);
            for (int lane = 0; lane < OF_PANEL && at + lane < p->n->outputs; lane += FLOATS)
                finish_rows(p, at + lane, first_of_block(p, from), first_of_block(p, behind), sums[0] + lane, sums[1] + lane, OF_PANEL);
        }
}

static const char *multiply_integers(const struct multiply_integers *n) {
    const Stored how = (Stored)n->stored;
    const char *why = unlike(how, n->stored, n->columns, n->groups, n->scale_kind);
    if (why) return why;
    if (how != INT8 && how != INT8_GROUPS && how != INT4_GROUPS && how != UINT4_GROUPS && !in_blocks(how)) return refused("integers of a weight, got %zd", n->stored);
    if (n->gate > NOTHING) return refused("0 to %d for gates, got %zd", NOTHING, n->gate);
    if (n->scale_kind >= POWERS) return refused("scales that are floats, got %zd", n->scale_kind);
    if (!n->columns) return refused("columns, got none");
    if (!n->is_rounded && !n->is_packed) return refused("a packed weight where rows are not rounded");
    if (n->is_packed && (in_blocks(how) || bytes_of(how, n->columns) % FOUR || (is_gated(n) && n->outputs % OF_PANEL)))
        return refused("a packed weight has outputs of a multiple of %d bytes, and where there are gates a multiple of %d, got %zd x %zd", FOUR, OF_PANEL, n->outputs, n->columns);
    const Py_ssize_t length = how == INT8 ? n->is_rounded ? (Py_ssize_t)CHUNK : n->columns : in_blocks(how) ? BLOCK / (has_minima(how) ? FACTORS / 2 : FACTORS) : n->columns / n->groups;
    if (in_blocks(how) && n->groups != n->columns / length) return refused("groups of %zd columns, got %zd of %zd columns", length, n->groups, n->columns);
    Int8 p = {.n = n, .length = length, .bytes = bytes_of(how, n->columns), .outputs = n->outputs * (1 + is_gated(n))};
    Share outputs = int8_outputs;
    Py_ssize_t whole = STEP, each = OF_PANEL;  // columns that are multiplied at once, outputs
    if (in_blocks(how)) outputs = outputs_of(how), each = FLOATS, whole = BLOCK;
#if HAS_TILES
    else if (n->is_rounded && n->rows > IN_BLOCK && has_tiles()) p.is_tiled = true, outputs = int8_outputs_by_tiles, whole = IN_TILE;
#endif
    else if (lies_packed(&p)) outputs = packed_outputs_of(&p);
    const bool are_alone = how == INT8 && lies_packed(&p) && n->rows <= most_alone(n->is_rounded);
    const Py_ssize_t most = in_blocks(how) ? 1 : p.is_tiled ? (Py_ssize_t)OF_TILE : are_alone ? most_alone(n->is_rounded) : most_in_block(n->is_rounded);
    p.blocks = (n->rows + most - 1) / most;
#if !BYTES_BY_FOURS
    p.in_words = !in_blocks(how) && (!BYTES_BY_PAIRS || (how < INT4_GROUPS && !lies_packed(&p)));
#endif
    p.padded = (n->columns + whole - 1) / whole * whole, p.parts = (n->columns + p.length - 1) / p.length;
    p.next = in_blocks(how) ? p.padded / BLOCK * BLOCK_OF_X : p.padded * bytes_of_rounded(&p);
    p.scales = n->work, p.sums = p.scales + n->rows, p.begins = (int32_t *)p.sums;
    p.quantized = (Rounded *)(((uintptr_t)(p.sums + (p.is_tiled ? p.blocks * OF_TILE : n->rows) * p.parts) + VECTOR - 1) / VECTOR * VECTOR);
    const Py_ssize_t elements = n->rows * n->columns, shares = (n->outputs + each - 1) / each;
    const unsigned threads = elements < SMALL_QUANTIZED ? 1 : (unsigned)n->threads;
    in_shares(n->is_rounded ? round_blocks : place_blocks, &p, p.blocks, in_blocks(how) ? IN_BLOCK : 1, threads);
    // A thread takes a multiple of the panels, or vectors, that it reads in turn, so that none is left to be read alone.
    const Py_ssize_t halves = 1 + is_gated(n), together = (STREAMS + halves - 1) / halves, least = QUANTIZED_SHARE / (p.bytes * each * halves + 1) / together * together;
    in_shares(outputs, &p, shares, least ? least : together, p.outputs * p.bytes < SMALL_QUANTIZED ? 1 : (unsigned)n->threads);
    return NULL;
}
