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
    TILE_SUMS = REGISTERS / 2,       // vectors of sums
};

// What a row is multiplied by: two of them are one lane where bfloat16 is multiplied in pairs.
#if PAIRS
typedef uint16_t Factor;
#else
typedef float Factor;
#endif

// A block of tokens: where the key and the value of each are, from `start` to `end` of all TOKENS.
typedef struct {
    const uint16_t *keys[TOKENS], *values[TOKENS];
    Py_ssize_t start, end;
} Block;

// The same as products take it.
typedef struct {
    uint32_t *keys;    // [pairs of features, TOKENS]
    uint32_t *values;  // [pairs of tokens, padded]: of LANES features the even ones, then the odd ones
    Py_ssize_t pairs, padded;
} Laid;

// What rows have seen until now: the weighted sums of values, in the order of `Laid`; the greatest score; and the sum of the weights, which are relative to it.
typedef struct {
    float *sums, *greatest, *totals;
} State;

// How scores become weights.
typedef struct {
    float scale, softcap;
    const void *const *bias;  // of each row what is added in this block, of elements of so many bytes; or NULL
    Py_ssize_t bias_bytes;
} Scoring;

INLINE Py_ssize_t least(Py_ssize_t a, Py_ssize_t b) { return a < b ? a : b; }
INLINE Py_ssize_t most(Py_ssize_t a, Py_ssize_t b) { return a > b ? a : b; }
INLINE Py_ssize_t rounded_up(Py_ssize_t count, Py_ssize_t to) { return (count + to - 1) / to * to; }

// LANES features of token i from one on, zero where there are none.
FAST INLINE Bits features(const Block *b, const uint16_t *const *tokens, Py_ssize_t i, Py_ssize_t at, Py_ssize_t size) {
    if (i < b->start || i >= b->end) return (Bits){0};
    return (Bits)(at + LANES <= size ? words(tokens[i] + at) : first_words(tokens[i] + at, size - at));
}

FAST static void lay_keys(const Laid *to, const Block *b, Py_ssize_t size) {
    for (Py_ssize_t token = b->start / LANES * LANES; token < rounded_up(b->end, LANES); token += FLOATS)
        for (Py_ssize_t at = 0; at < size; at += LANES) {
            Bits rows[FLOATS];
#pragma GCC unroll 16
            for (int i = 0; i < FLOATS; i++) rows[i] = features(b, b->keys, token + i, at, size);
            transpose(rows);
#pragma GCC unroll 16
            for (int i = 0; i < FLOATS; i++) memcpy(to->keys + (at / 2 + i) * TOKENS + token, rows + i, sizeof *rows);
        }
}

FAST static void lay_values(const Laid *to, const Block *b, Py_ssize_t size) {
    for (Py_ssize_t pair = b->start / 2; 2 * pair < b->end; pair++)
        for (Py_ssize_t at = 0; at < size; at += LANES) {
            const Bits first = features(b, b->values, 2 * pair, at, size), second = features(b, b->values, 2 * pair + 1, at, size);
            const Bits even = (first & 0xFFFF) | second << 16, odd = first >> 16 | (second & 0xFFFF0000);
            uint32_t *place = to->values + pair * to->padded + at;
            memcpy(place, &even, sizeof even), memcpy(place + FLOATS, &odd, sizeof odd);
        }
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

// Sums of `rows` rows of factors and `vectors` vectors of columns of a matrix; both are constants wherever this is inlined.
FAST INLINE void multiply_tile(Floats *sums, const Factor *factors, Py_ssize_t next, const uint32_t *matrix, Py_ssize_t columns, Py_ssize_t pairs,
                               const int rows, const int vectors) {
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++) sums[i] = all(0.0f);
    for (Py_ssize_t pair = 0; pair < pairs; pair++, matrix += columns, factors += 2) {
        Words some[TILE_SUMS];
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) some[i] = words((const uint16_t *)(matrix + i * FLOATS));
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
            for (int i = 0; i < vectors; i++) sums[row * vectors + i] = add_pair(sums[row * vectors + i], factors + row * next, some[i]);
    }
}

// Scores of `vectors` vectors of keys.
FAST INLINE void score(float (*scores)[TOKENS], const Factor *q, const Laid *b, Py_ssize_t at, float scale, const int rows, const int vectors) {
    Floats sums[TILE_SUMS];
    multiply_tile(sums, q, 2 * b->pairs, b->keys + at, TOKENS, b->pairs, rows, vectors);
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++) store(scores[i / vectors] + at + i % vectors * FLOATS, sums[i] * scale);
}

// Make the sums relative to another score, and add weighted values to `vectors` vectors of them.
FAST INLINE void gather(float *sums, Factor (*weights)[TOKENS], const Laid *b, Py_ssize_t first, Py_ssize_t end, Py_ssize_t at, const float *kept,
                        const float *added, const int rows, const int vectors) {
    Floats parts[TILE_SUMS];
    const uint32_t *values = b->values + first / 2 * b->padded + at;
    multiply_tile(parts, weights[0] + first / 2 * 2, TOKENS, values, b->padded, (end + 1) / 2 - first / 2, rows, vectors);
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; i++) {
        float *to = sums + i / vectors * b->padded + at + i % vectors * FLOATS;
        store(to, fused(parts[i], all(added[i / vectors]), floats(to) * kept[i / vectors]));
    }
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

// Where nothing is seen all weights are to be 0, not e^(minus infinity - minus infinity).
INLINE float base_of(float greatest) { return greatest == -INFINITY ? 0.0f : greatest; }

// Turn the scores of a row into weights e^(score - greatest), and say what the greatest is, and their sum.
FAST INLINE void weigh(Factor *weights, float *scores, Py_ssize_t first, Py_ssize_t end, float *greatest, float *sum) {
    for (Py_ssize_t i = first / LANES * LANES; i < first; i++) scores[i] = -INFINITY;
    for (Py_ssize_t i = end; i < rounded_up(end, LANES); i++) scores[i] = -INFINITY;
    Floats highest = all(-INFINITY), sums = all(0.0f);
    first = first / LANES * LANES;
    for (Py_ssize_t i = first; i < end; i += FLOATS) highest = greater(floats(scores + i), highest);
    *greatest = greatest_of(highest);
    const float from = base_of(*greatest);
    for (Py_ssize_t i = first; i < end; i += LANES)
        sums = store_weights(weights + i, exponential(floats(scores + i) - from), exponential(floats(scores + i + FLOATS) - from), sums);
    *sum = total(sums);
}

// Add up greatest scores and sums of weights of `rows` rows, and say by what sums until now and those that are added are to be multiplied.
FAST INLINE void join_weights(State to, const float *greatest, const float *totals, float *kept, float *added, Py_ssize_t rows) {
    float by[2 * AT_ONCE] = {0};
    for (Py_ssize_t i = 0; i < rows; i++) {
        const float now = to.greatest[i] < greatest[i] ? greatest[i] : to.greatest[i], from = base_of(now);
        by[i] = to.greatest[i] - from, by[AT_ONCE + i] = greatest[i] - from;
        to.greatest[i] = now;
    }
    for (int i = 0; i < 2 * AT_ONCE; i += FLOATS) store(by + i, exponential(floats(by + i)));
    memcpy(kept, by, sizeof by / 2), memcpy(added, by + AT_ONCE, sizeof by / 2);
    for (Py_ssize_t i = 0; i < rows; i++) to.totals[i] = fused(all(totals[i]), all(added[i]), all(to.totals[i]) * kept[i])[0];
}

// Attend with `rows` rows, a constant wherever this is inlined, to the tokens `first` to `end` of a block.
FAST INLINE void attend_rows(State to, const Factor *q, const Laid *b, Py_ssize_t first, Py_ssize_t end, const Scoring *how, const int rows) {
    const int wide = TILE_SUMS / rows < 2 ? 2 : TILE_SUMS / rows > 8 ? 8 : TILE_SUMS / rows / 2 * 2;
    const Py_ssize_t to_token = rounded_up(end, LANES);
    float scores[AT_ONCE][TOKENS] __attribute__((aligned(64))), greatest[AT_ONCE], totals[AT_ONCE], kept[AT_ONCE], added[AT_ONCE];
    Factor weights[AT_ONCE][TOKENS] __attribute__((aligned(64)));
    Py_ssize_t at = first / LANES * LANES;
    for (; at + wide * FLOATS <= to_token; at += wide * FLOATS) score(scores, q, b, at, how->scale, rows, wide);
    for (; at < to_token; at += LANES) score(scores, q, b, at, how->scale, rows, 2);
    for (int row = 0; row < rows; row++) {
        for (at = first / LANES * LANES; how->softcap > 0.0f && at < end; at += FLOATS)
            store(scores[row] + at, capped(floats(scores[row] + at), how->softcap));
        if (how->bias) add_bias(scores[row], how->bias[row], how->bias_bytes, first, end);
        weigh(weights[row], scores[row], first, end, greatest + row, totals + row);
    }
    join_weights(to, greatest, totals, kept, added, rows);
    for (at = 0; at + wide * FLOATS <= b->padded; at += wide * FLOATS) gather(to.sums, weights, b, first, end, at, kept, added, rows, wide);
    for (; at < b->padded; at += LANES) gather(to.sums, weights, b, first, end, at, kept, added, rows, 2);
}

// Hide one of two tokens, of which `which` marks the bits of the other, from a product: even times zero it might be no number.
FAST INLINE void hide(const Laid *b, Py_ssize_t token, uint32_t which, uint32_t *kept) {
    uint32_t *pairs = b->values + token / 2 * b->padded;
    memcpy(kept, pairs, (size_t)b->padded * sizeof *pairs);
    for (Py_ssize_t i = 0; i < b->padded; i++) pairs[i] &= which;
}

FAST INLINE void show(const Laid *b, Py_ssize_t token, const uint32_t *kept) {
    memcpy(b->values + token / 2 * b->padded, kept, (size_t)b->padded * sizeof *kept);
}

// Attend with up to AT_ONCE rows that see the same tokens of a block.
FAST static void attend_block(State to, const Factor *q, const Laid *b, Py_ssize_t first, Py_ssize_t end, const Scoring *how, Py_ssize_t rows) {
    uint32_t before[b->padded], behind[b->padded];
    if (first % 2) hide(b, first, 0xFFFF0000, before);
    if (end % 2) hide(b, end, 0xFFFF, behind);
    switch (rows) {
#define ROWS(count) \
    case count: attend_rows(to, q, b, first, end, how, count); break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if REGISTERS == 32
        ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#endif
#undef ROWS
    }
    if (first % 2) show(b, first, before);
    if (end % 2) show(b, end, behind);
}

#endif
