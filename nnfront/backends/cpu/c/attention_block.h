// SPDX-License-Identifier: Apache-2.0
// Attention of rows, each a head of a query, to a block of tokens: two products of matrices, and between them the softmax.
//
// A block is laid out once for all rows, as both products want it: pairs of what is summed over in the lanes of a vector, next to each other what is not. Sums of a row
// go over the features of a key, then over the tokens of the block, then over blocks, one after the other whatever rows there are beside it. A block has
// weights of its own, relative to its own greatest score; so blocks that threads attend to apart are joined as one after the other is (online softmax: Milakov and Gimelshein, 2018).

#ifndef NNFRONT_ATTENTION_BLOCK_H
#define NNFRONT_ATTENTION_BLOCK_H

#include <math.h>

#include "words.h"

enum {
    TOKENS = 128,               // of a block
    AT_ONCE = REGISTERS / 4,    // rows whose sums stay in registers, two vectors of each
    TILE_SUMS = REGISTERS / 2,  // vectors of sums
    IN_VECTORS = AT_ONCE < FLOATS ? FLOATS : AT_ONCE,  // room for a number of each row, in whole vectors
};

#define LEAST_EXPONENT -86.0f  // whose power is far from denormal numbers

// A block of tokens: where the key and the value of each are, from `start` to `end` of all TOKENS.
typedef struct {
    const uint16_t *keys[TOKENS], *values[TOKENS];
    Py_ssize_t start, end;
} Block;

// The same as products take it: in panels of FLOATS columns, one after the other. Where values are not multiplied in pairs they are taken from where they are.
typedef struct {
    uint32_t *keys;    // [TOKENS / FLOATS, pairs of features, FLOATS], panels key_panel apart
    uint32_t *values;  // [padded / FLOATS, pairs of tokens, FLOATS]: of LANES features the even ones, then the odd ones
    Py_ssize_t pairs, padded, key_panel, value_size;
    const Block *block;
} Laid;

enum { VALUE_PANEL = TOKENS / 2 * FLOATS };

// What rows have seen until now: the weighted sums of values, in the order of `Laid`; the greatest score; and the sum of the weights, which are relative to it.
typedef struct {
    float *sums, *greatest, *totals;
} State;

// What a row sees of a block.
typedef struct {
    Py_ssize_t first, end;
} Part;

// How scores become weights.
typedef struct {
    float scale, softcap;
    bool is_plain;  // scores are multiplied by a positive number and by no more, when they are weighed
    const void *const *bias;  // of each row what is added in this block, of elements of so many bytes; or NULL
    Py_ssize_t bias_bytes;
} Scoring;

// LANES features of a token from one on, zero where there are none.
FAST INLINE Bits features(const uint16_t *token, Py_ssize_t at, Py_ssize_t size) {
    return (Bits)(at + LANES <= size ? words(token + at) : first_words(token + at, size - at));
}

// The same of token i of a block, zero where there is none.
FAST INLINE Bits features_of(const Block *b, const uint16_t *const *tokens, Py_ssize_t i, Py_ssize_t at, Py_ssize_t size) {
    return i < b->start || i >= b->end ? (Bits){0} : features(tokens[i], at, size);
}

// Values that are taken from where they are come nearer meanwhile.
FAST static void lay_keys(const Laid *to, const Block *b, Py_ssize_t size) {
    for (Py_ssize_t token = b->start / LANES * LANES; token < rounded_up(b->end, LANES); token += FLOATS)
        for (Py_ssize_t at = 0; at < size; at += LANES) {
            Bits rows[FLOATS];
            for (Py_ssize_t i = most(token, b->start); !PAIRS && at % (LINE / 2) == 0 && i < least(token + FLOATS, b->end); i++) fetch(b->values[i] + at);
#pragma GCC unroll 16
            for (int i = 0; i < FLOATS; i++) rows[i] = features_of(b, b->keys, token + i, at, size);
            transpose(rows);
#pragma GCC unroll 16
            for (int i = 0; i < FLOATS; i++) memcpy(to->keys + token / FLOATS * to->key_panel + (at / 2 + i) * FLOATS, rows + i, sizeof *rows);
        }
}

// Zeros are next to them, as far as tiles reach.
FAST static void lay_values(const Laid *to, const Block *b, Py_ssize_t size) {
    for (Py_ssize_t pair = b->start / LANES * FLOATS; 2 * pair < rounded_up(b->end, LANES); pair++)
        for (Py_ssize_t at = 0; at < size; at += LANES) {
            const Bits first = features_of(b, b->values, 2 * pair, at, size), second = features_of(b, b->values, 2 * pair + 1, at, size);
            const Bits even = (first & 0xFFFF) | second << 16, odd = first >> 16 | (second & 0xFFFF0000);
            uint32_t *place = to->values + at / FLOATS * VALUE_PANEL + pair * FLOATS;
            memcpy(place, &even, sizeof even), memcpy(place + VALUE_PANEL, &odd, sizeof odd);
        }
}

// Whether all values that are laid are numbers: zero times such a one is zero.
FAST static bool are_numbers(const Laid *b, Py_ssize_t first, Py_ssize_t end) {
    Bits found = {0};
    for (Py_ssize_t panel = 0; panel < b->padded / FLOATS; panel++)
        for (Py_ssize_t pair = first / LANES * FLOATS; 2 * pair < rounded_up(end, LANES); pair++) {
            const Bits both = (Bits)floats(b->values + panel * VALUE_PANEL + pair * FLOATS);
            found |= (Bits)((both & 0x7F80) == 0x7F80) | (Bits)((both & 0x7F800000) == 0x7F800000);
        }
    return total((Floats)(found & 0x3F800000)) == 0.0f;
}

// Add to a sum what two factors and as many rows of a matrix, whose columns are in pairs, contribute.
FAST INLINE Floats add_pair(Floats sum, const Factor *two, Words pairs) {
#if PAIRS
    uint32_t both;
    memcpy(&both, two, sizeof both);
    return dot(sum, (Words)((Bits){0} + both), pairs);
#else
    sum = fused(all(two[0]), (Floats)((Bits)pairs << 16), sum);
    return fused(all(two[1]), (Floats)((Bits)pairs & 0xFFFF0000), sum);
#endif
}

// Sums of `rows` rows of factors and `vectors` panels of a matrix, so far apart; both are constants wherever this is inlined.
FAST INLINE void multiply_tile(Floats *sums, const Factor *factors, Py_ssize_t next, const uint32_t *matrix, Py_ssize_t panel, Py_ssize_t pairs,
                               const int rows, const int vectors) {
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++) sums[i] = all(0.0f);
    for (Py_ssize_t pair = 0; pair < pairs; pair++, matrix += FLOATS, factors += 2) {
        Words some[TILE_SUMS];
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) some[i] = words((const uint16_t *)(matrix + i * panel));
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
            for (int i = 0; i < vectors; i++) sums[row * vectors + i] = add_pair(sums[row * vectors + i], factors + row * next, some[i]);
    }
}

// Scores of `vectors` vectors of keys.
FAST INLINE void score(float (*scores)[TOKENS], const Factor *q, const Laid *b, Py_ssize_t at, const int rows, const int vectors) {
    Floats sums[TILE_SUMS];
    multiply_tile(sums, q, 2 * b->pairs, b->keys + at / FLOATS * b->key_panel, b->key_panel, b->pairs, rows, vectors);
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++) store(scores[i / vectors] + at + i % vectors * FLOATS, sums[i]);
}

// Sums of weighted values from one feature on, the even ones of LANES before the odd ones.
FAST INLINE void weighted_values(Floats *sums, Factor (*weights)[TOKENS], const Laid *b, Py_ssize_t first, Py_ssize_t end, Py_ssize_t at, const int rows, const int vectors) {
#if PAIRS
    const uint32_t *values = b->values + at / FLOATS * VALUE_PANEL + first / 2 * FLOATS;
    multiply_tile(sums, weights[0] + first / 2 * 2, TOKENS, values, VALUE_PANEL, (end + 1) / 2 - first / 2, rows, vectors);
#else
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++) sums[i] = all(0.0f);
    for (Py_ssize_t token = first; token < end; token++) {
        Floats values[TILE_SUMS];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i += 2) {
            const Bits both = features(b->block->values[token], at + i / 2 * LANES, b->value_size);
            values[i] = (Floats)(both << 16), values[i + 1] = (Floats)(both & 0xFFFF0000);
        }
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
            for (int i = 0; i < vectors; i++) sums[row * vectors + i] = fused(all(weights[row][token]), values[i], sums[row * vectors + i]);
    }
#endif
}

// Make the sums relative to another score, and add weighted values to `vectors` vectors of them.
FAST INLINE void gather(float *sums, Factor (*weights)[TOKENS], const Laid *b, Py_ssize_t first, Py_ssize_t end, Py_ssize_t at, const float *kept,
                        const float *added, const int rows, const int vectors) {
    Floats parts[TILE_SUMS];
    weighted_values(parts, weights, b, first, end, at, rows, vectors);
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++) {
        float *to = sums + i / vectors * b->padded + at + i % vectors * FLOATS;
        store(to, fused(parts[i], all(added[i / vectors]), floats(to) * kept[i / vectors]));
    }
}

// e^x for x <= 0, and 0 where it would be so small that processors take long for it. A NaN stays one.
FAST INLINE Floats factor_of(Floats x) {
    Floats n;
    const Floats rest = exponential_of_rest(greater(all(LEAST_EXPONENT), x), &n);
    return where_less(x, all(LEAST_EXPONENT), all(0.0f), times_normal_power(rest, n));
}

// The same, as exact as the weight that it becomes.
FAST INLINE Floats weight_of(Floats x) {
#if PAIRS
    const float series[] = {0.05590643f, 0.24024099f, 0.69312419f, 1.0f};  // of 2^r with |r| <= 1/2
    const Floats some = greater(all(LEAST_EXPONENT), x), to_two = all(1.44269504f), shifted = fused(some, to_two, all(0x1.8p23f)), n = shifted - 0x1.8p23f;
    const Floats r = fused(some, to_two, -n);
    Floats sum = all(0.00958285f);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sum = fused(sum, r, all(series[i]));
    return where_less(x, all(LEAST_EXPONENT), all(0.0f), times_normal_power(sum, n));
#else
    return factor_of(x);
#endif
}

// softcap * tanh(score / softcap), by tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|).
FAST INLINE Floats capped(Floats x, float softcap) {
    const Floats power = exponential(absolute(x) * (-2.0f / softcap));
    return with_sign(softcap * (1.0f - power) / (1.0f + power), x);
}

// Add to the scores of tokens what is given for them.
static void add_bias(float *scores, const void *bias, Py_ssize_t bytes, Py_ssize_t first, Py_ssize_t end) {
    for (Py_ssize_t i = first; i < end; i++) {
        if (bytes == 4)
            scores[i] += ((const float *)bias)[i];
        else if (bytes == 2)
            scores[i] += widened(((const uint16_t *)bias)[i]);
        else if (!((const char *)bias)[i])
            scores[i] = -INFINITY;
    }
}

// 1 in bfloat16. GCC 12 writes that as 1 in float16 for arm64, where it knows it.
FAST INLINE Words ones(void) {
    Words found = (Words){0} + 0x3F80;
#if NEON_BF16
    __asm__("" : "+w"(found));
#endif
    return found;
}

// Two vectors of weights as factors; returns their sum, as factors, added to `sum`.
FAST INLINE Floats store_weights(Factor *to, Floats low, Floats high, Floats sum) {
#if AVX512_BF16
    const Words both = (Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    memcpy(to, &both, sizeof both);
    return dot(sum, both, ones());  // times 1
#elif PAIRS
    store_rounded(to, first_lanes(FLOATS), low), store_rounded(to + FLOATS, first_lanes(FLOATS), high);
    return dot(sum, words(to), ones());
#else
    store(to, low), store(to + FLOATS, high);
    return sum + low + high;
#endif
}

// The lanes from `first` to `end`, minus infinity in the others.
FAST INLINE Floats only_between(Py_ssize_t first, Py_ssize_t end, Floats values) {
    Ints lanes;
    for (int i = 0; i < FLOATS; i++) lanes[i] = i;
    const Ints are_there = (lanes >= (int32_t)first) & (lanes < (int32_t)end);
    return (Floats)(((Ints)values & are_there) | ((Ints)all(-INFINITY) & ~are_there));
}

INLINE float scale_left(const Scoring *how) { return how->is_plain ? how->scale : 1.0f; }

// Finish the scores of a row, but for a scale that is left, and hide what is beside those that it sees. Returns a vector of the greatest ones.
FAST INLINE Floats settle(float *scores, Py_ssize_t first, Py_ssize_t end, const Scoring *how, Py_ssize_t row) {
    Floats highest = all(-INFINITY);
    for (Py_ssize_t i = first / LANES * LANES; !how->is_plain && i < end; i += FLOATS) {
        const Floats scaled = floats(scores + i) * how->scale;
        store(scores + i, how->softcap > 0.0f ? capped(scaled, how->softcap) : scaled);
    }
    if (how->bias) add_bias(scores, how->bias[row], how->bias_bytes, first, end);
#pragma GCC unroll 8
    for (Py_ssize_t i = first / LANES * LANES; i < rounded_up(end, LANES); i += FLOATS) {
        if (i < first || i + FLOATS > end) store(scores + i, only_between(first - i, end - i, floats(scores + i)));
        highest = greater(floats(scores + i), highest);
    }
    return highest;
}

// Where nothing is seen all weights are to be 0, not e^(minus infinity - minus infinity).
INLINE float base_of(float greatest) { return greatest == -INFINITY ? 0.0f : greatest; }

// Turn the scores of a row into weights e^(score - greatest). Returns a vector of their sum.
FAST INLINE Floats weigh(Factor *weights, const float *scores, Py_ssize_t first, Py_ssize_t end, float scale, float greatest) {
    const Floats by = all(scale), from = all(-base_of(greatest));
    Floats sum = all(0.0f);
#pragma GCC unroll 4
    for (Py_ssize_t i = first / LANES * LANES; i < rounded_up(end, LANES); i += LANES)
        sum = store_weights(weights + i, weight_of(fused(floats(scores + i), by, from)), weight_of(fused(floats(scores + i + FLOATS), by, from)), sum);
    return sum;
}

// Add up greatest scores and sums of weights of `rows` rows, and say by what sums until now and those that are added are to be multiplied, in whole vectors.
FAST INLINE void join_weights(State to, const float *greatest, const float *totals, float *kept, float *added, Py_ssize_t rows) {
    for (Py_ssize_t i = 0; i < rows; i += FLOATS) {
        const Lanes there = first_lanes(rows - i);
        const Floats old = floats_there(to.greatest + i, there), other = floats_there(greatest + i, there), now = greater(other, old);
        const Floats from = where_less(all(-INFINITY), now, now, all(0.0f)), by = factor_of(old - from), by_other = factor_of(other - from);
        store(kept + i, by), store(added + i, by_other);
        store_there(to.greatest + i, there, now);
        store_there(to.totals + i, there, fused(floats_there(totals + i, there), by_other, floats_there(to.totals + i, there) * by));
    }
}

// Attend with `rows` rows, a constant wherever this is inlined, to the tokens `first` to `end` of a block.
FAST INLINE void attend_rows(State to, const Factor *q, const Laid *b, Py_ssize_t first, Py_ssize_t end, const Scoring *how, const int rows) {
    const int wide = TILE_SUMS / rows < 2 ? 2 : TILE_SUMS / rows > 8 ? 8 : TILE_SUMS / rows / 2 * 2;
    const Py_ssize_t to_token = rounded_up(end, LANES);
    float scores[AT_ONCE][TOKENS] __attribute__((aligned(64))), greatest[AT_ONCE], totals[AT_ONCE], kept[IN_VECTORS], added[IN_VECTORS];
    Factor weights[AT_ONCE][TOKENS] __attribute__((aligned(64)));
    Py_ssize_t at = first / LANES * LANES;
    for (; at + wide * FLOATS <= to_token; at += wide * FLOATS) score(scores, q, b, at, rows, wide);
    for (; at < to_token; at += LANES) score(scores, q, b, at, rows, 2);
    for (int row = 0; row < rows; row++) {
        greatest[row] = greatest_of(settle(scores[row], first, end, how, row)) * scale_left(how);
        totals[row] = total(weigh(weights[row], scores[row], first, end, scale_left(how), greatest[row]));
    }
    join_weights(to, greatest, totals, kept, added, rows);
    for (at = 0; at + wide * FLOATS <= b->padded; at += wide * FLOATS) gather(to.sums, weights, b, first, end, at, kept, added, rows, wide);
    for (; at < b->padded; at += LANES) gather(to.sums, weights, b, first, end, at, kept, added, rows, 2);
}

// Hide one of two tokens, of which `which` marks the bits of the other, from a product: even times zero it might be no number.
FAST INLINE void hide(const Laid *b, Py_ssize_t token, uint32_t which, uint32_t *kept) {
    uint32_t *pairs = b->values + token / 2 * FLOATS;
    for (Py_ssize_t i = 0; i < b->padded; i += FLOATS, pairs += VALUE_PANEL) {
        memcpy(kept + i, pairs, sizeof(Bits));
        for (int j = 0; j < FLOATS; j++) pairs[j] &= which;
    }
}

FAST INLINE void show(const Laid *b, Py_ssize_t token, const uint32_t *kept) {
    uint32_t *pairs = b->values + token / 2 * FLOATS;
    for (Py_ssize_t i = 0; i < b->padded; i += FLOATS, pairs += VALUE_PANEL) memcpy(pairs, kept + i, sizeof(Bits));
}

// Attend with up to AT_ONCE rows that see the same tokens of a block.
FAST static void attend_block(State to, const Factor *q, const Laid *b, Py_ssize_t first, Py_ssize_t end, const Scoring *how, Py_ssize_t rows) {
    uint32_t before[PAIRS ? b->padded : 1], behind[PAIRS ? b->padded : 1];
    if (PAIRS && first % 2) hide(b, first, 0xFFFF0000, before);
    if (PAIRS && end % 2) hide(b, end, 0xFFFF, behind);
    switch (rows) {
#define ROWS(count) \
    case count: attend_rows(to, q, b, first, end, how, count); break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if REGISTERS == 32
        ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#endif
#undef ROWS
    }
    if (PAIRS && first % 2) show(b, first, before);
    if (PAIRS && end % 2) show(b, end, behind);
}

#endif
