// SPDX-License-Identifier: Apache-2.0
// Attention of one token of each sequence to a cache in bfloat16, which it is stored in before.
//
// Keys and values are read once for all query heads that share them, a block of tokens at a time; the softmax is kept up to date from block
// to block (online softmax: Milakov and Gimelshein, 2018), so that nothing is as long as the sequence. Where there are fewer pairs of
// sequence and key head than threads, several threads share the tokens of a pair, and their parts are joined at the end.

#include <math.h>
#include <stdlib.h>

#include "native.h"

#if HAS_KERNELS

enum {
    TOKENS = 128,     // of a block: its keys and values stay in the nearer caches
    MOST_HEADS = 8,   // query heads of a key head at a time: their sums stay in registers
    MOST_SIZE = 256,  // features of a head, a multiple of LANES
    FLOATS = 16,      // in a vector
    MOST_VECTORS = 4, // of features at a time
    SMALL = 1 << 14,  // features of keys that take less time than waking threads
};

typedef struct {
    const uint16_t *q;         // [batch, groups, shared, size], sequences next_q elements apart
    uint16_t *keys, *values;   // [batch, groups, capacity, size]
    const int32_t *lengths;    // tokens of each sequence, the new one among them
    float *parts;              // [batch * groups, splits, part]: sums [shared, size], and for each MOST_HEADS heads a State
    Py_ssize_t batch, groups, shared, size, capacity, window, next_q, splits, part;
    float scale;
} Attention;

// The greatest score until now, and the sum of the weights that are relative to it.
typedef struct {
    float greatest[MOST_HEADS], totals[MOST_HEADS];
} State;

INLINE State *state_of(const Attention *a, float *part, Py_ssize_t head) {
    return (State *)(part + a->shared * a->size) + head / MOST_HEADS;
}

INLINE Py_ssize_t least(Py_ssize_t a, Py_ssize_t b) { return a < b ? a : b; }

// The sums of four vectors.
FAST INLINE __m128 four_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    const __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(abcd), 1));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), high);
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// Scores of keys with `heads` queries, a constant wherever this is inlined.
FAST INLINE void score(float (*scores)[MOST_HEADS], const Attention *a, const uint16_t *q, const uint16_t *keys,
                       const uint16_t *values, Py_ssize_t tokens, const int heads) {
    for (Py_ssize_t token = 0; token < tokens; token++) {
        __m512 sums[MOST_HEADS];
#pragma GCC unroll 8
        for (int head = 0; head < MOST_HEADS; head++) sums[head] = _mm512_setzero_ps();
        for (Py_ssize_t i = 0; i < a->size; i += LANES) {
            const __m512bh key = (__m512bh)_mm512_loadu_si512(keys + token * a->size + i);
            _mm_prefetch((const char *)(values + token * a->size + i), _MM_HINT_T0);  // wanted next
#pragma GCC unroll 8
            for (int head = 0; head < heads; head++)
                sums[head] = _mm512_dpbf16_ps(sums[head], key, (__m512bh)_mm512_loadu_si512(q + head * a->size + i));
        }
#pragma GCC unroll 2
        for (int head = 0; head < MOST_HEADS; head += 4) {
            const __m128 four = head < heads ? four_sums(sums[head], sums[head + 1], sums[head + 2], sums[head + 3]) : _mm_setzero_ps();
            _mm_storeu_ps(scores[token] + head, _mm_mul_ps(four, _mm_set1_ps(a->scale)));
        }
    }
}

// Turn scores into weights e^(score - greatest), count them in, and say by what the sums until now are to be multiplied.
FAST INLINE void weigh(float (*scores)[MOST_HEADS], Py_ssize_t tokens, State *state, float *kept) {
    const __m256 before = _mm256_loadu_ps(state->greatest);
    __m256 now = before, sums = _mm256_setzero_ps();
    for (Py_ssize_t token = 0; token < tokens; token++) now = _mm256_max_ps(now, _mm256_loadu_ps(scores[token]));
    for (Py_ssize_t token = 0; token < tokens; token += 2) {
        const __m512 from = _mm512_broadcast_f32x8(now);
        const __m512 weights = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores[token]), from));
        _mm512_storeu_ps(scores[token], weights);
    }
    for (Py_ssize_t token = 0; token < tokens; token++) sums = _mm256_add_ps(sums, _mm256_loadu_ps(scores[token]));
    const __m256 by = _mm512_castps512_ps256(exponential(_mm512_castps256_ps512(_mm256_sub_ps(before, now))));
    _mm256_storeu_ps(kept, by);
    _mm256_storeu_ps(state->greatest, now);
    _mm256_storeu_ps(state->totals, _mm256_fmadd_ps(_mm256_loadu_ps(state->totals), by, sums));
}

// Add weighted values to the sums of `heads` heads, `vectors` vectors of features; both are constants wherever this is inlined.
FAST INLINE void gather(float *sums, const Attention *a, float (*weights)[MOST_HEADS], const float *kept, const uint16_t *values,
                        Py_ssize_t tokens, const int heads, const int vectors) {
    __m512 parts[MOST_HEADS * MOST_VECTORS];
#pragma GCC unroll 32
    for (int i = 0; i < heads * vectors; i++) {
        const __m512 until_now = _mm512_loadu_ps(sums + i / vectors * a->size + i % vectors * FLOATS);
        parts[i] = _mm512_mul_ps(until_now, _mm512_set1_ps(kept[i / vectors]));
    }
    for (Py_ssize_t token = 0; token < tokens; token++) {
        __m512 value[MOST_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
            const __m256i half = _mm256_loadu_si256((const __m256i *)(values + token * a->size + i * FLOATS));
            value[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        }
#pragma GCC unroll 32
        for (int i = 0; i < heads * vectors; i++)
            parts[i] = _mm512_fmadd_ps(_mm512_set1_ps(weights[token][i / vectors]), value[i % vectors], parts[i]);
    }
#pragma GCC unroll 32
    for (int i = 0; i < heads * vectors; i++)
        _mm512_storeu_ps(sums + i / vectors * a->size + i % vectors * FLOATS, parts[i]);
}

// A block of tokens and `heads` query heads, a constant wherever this is inlined.
FAST INLINE void block(float *sums, State *state, const Attention *a, const uint16_t *q, const uint16_t *keys,
                       const uint16_t *values, Py_ssize_t tokens, const int heads) {
    const int wide = heads <= 4 ? MOST_VECTORS : LANES / FLOATS;
    float scores[TOKENS][MOST_HEADS], kept[MOST_HEADS];
    score(scores, a, q, keys, values, tokens, heads);
    weigh(scores, tokens, state, kept);
    Py_ssize_t i = 0;
    for (; i + wide * FLOATS <= a->size; i += wide * FLOATS) gather(sums + i, a, scores, kept, values + i, tokens, heads, wide);
    for (; i < a->size; i += LANES) gather(sums + i, a, scores, kept, values + i, tokens, heads, LANES / FLOATS);
}

// Pairs of a sequence and a key head, each in `splits` parts.
FAST static void attend_parts(const void *attention, Py_ssize_t first, Py_ssize_t end) {
    const Attention *a = attention;
    for (Py_ssize_t at = first; at < end; at++) {
        const Py_ssize_t pair = at / a->splits, length = a->lengths[pair / a->groups], stored = least(length, a->capacity);
        // Where newer tokens lie over older ones, all that are stored are seen, and their order does not matter.
        const Py_ssize_t oldest = length == stored && a->window && length > a->window ? length - a->window : 0;
        const Py_ssize_t each = (stored - oldest + a->splits - 1) / a->splits;
        const Py_ssize_t from = oldest + at % a->splits * each, to = least(from + each, stored);
        const uint16_t *q = a->q + pair / a->groups * a->next_q + pair % a->groups * a->shared * a->size;
        const uint16_t *keys = a->keys + pair * a->capacity * a->size, *values = a->values + pair * a->capacity * a->size;
        float *part = a->parts + at * a->part;
        memset(part, 0, a->part * sizeof *part);
        for (Py_ssize_t head = 0; head < a->shared; head += MOST_HEADS)
            for (int i = 0; i < MOST_HEADS; i++) state_of(a, part, head)->greatest[i] = -INFINITY;
        for (Py_ssize_t token = from; token < to; token += TOKENS) {
            const Py_ssize_t tokens = least(TOKENS, to - token), skipped = token * a->size;
            for (Py_ssize_t head = 0; head < a->shared; head += MOST_HEADS) {
                float *sums = part + head * a->size;
                State *state = state_of(a, part, head);
#define HEADS(count) \
    case count: \
        block(sums, state, a, q + head * a->size, keys + skipped, values + skipped, tokens, count); \
        break;
                switch (least(MOST_HEADS, a->shared - head)) {
                    HEADS(1) HEADS(2) HEADS(3) HEADS(4) HEADS(5) HEADS(6) HEADS(7) HEADS(8)
                }
#undef HEADS
            }
        }
    }
}

// y [batch, groups, shared, size]: the parts of each head, made relative to the greatest score of all.
FAST static void join(const Attention *a, uint16_t *y) {
    const Py_ssize_t heads = a->batch * a->groups * a->shared;
    for (Py_ssize_t at = 0; at < heads; at++, y += a->size) {
        const Py_ssize_t head = at % a->shared;
        float *parts = a->parts + at / a->shared * a->splits * a->part, *sums = parts + head * a->size;
        float greatest = -INFINITY, total = 0.0f;
        for (Py_ssize_t s = 0; s < a->splits; s++) {
            const float its = state_of(a, parts + s * a->part, head)->greatest[head % MOST_HEADS];
            if (!(its <= greatest)) greatest = its;
        }
        for (Py_ssize_t s = 0; s < a->splits; s++) {
            const State *state = state_of(a, parts + s * a->part, head);
            const float its = state->greatest[head % MOST_HEADS], weight = its == -INFINITY ? 0.0f : expf(its - greatest);
            total += state->totals[head % MOST_HEADS] * weight;
            for (Py_ssize_t i = 0; i < a->size; i++) sums[i] = (s ? sums[i] : 0.0f) + sums[s * a->part + i] * weight;
        }
        for (Py_ssize_t i = 0; i < a->size; i++) y[i] = rounded(sums[i] / total);
    }
}

// Store the newest token of each sequence behind its others, or over the oldest.
static void append(const Attention *a, const uint16_t *k, const uint16_t *v, Py_ssize_t next_k, Py_ssize_t next_v) {
    const size_t head = a->size * sizeof *k;
    for (Py_ssize_t pair = 0; pair < a->batch * a->groups; pair++) {
        const Py_ssize_t sequence = pair / a->groups, group = pair % a->groups;
        const Py_ssize_t to = (pair * a->capacity + (a->lengths[sequence] - 1) % a->capacity) * a->size;
        memcpy(a->keys + to, k + sequence * next_k + group * a->size, head);
        memcpy(a->values + to, v + sequence * next_v + group * a->size, head);
    }
}

const char *append_and_attend(const struct append_and_attend *n) {
    Attention a = {
        .q = n->q, .keys = n->keys, .values = n->values, .lengths = n->lengths, .batch = n->batch, .groups = n->groups, .shared = n->shared,
        .size = n->size, .capacity = n->capacity, .window = n->window, .next_q = n->next_q, .splits = 1, .scale = (float)n->scale,
    };
    if (a.size < LANES || a.size > MOST_SIZE || a.size % LANES)
        return refused("heads of 32 to %d features, a multiple of 32, got %zd", MOST_SIZE, a.size);
    if (a.capacity < 1) return refused("a cache with room for a token");
    const Py_ssize_t pairs = a.batch * a.groups, threads = n->threads;
    Py_ssize_t longest = 0;
    for (Py_ssize_t i = 0; i < a.batch; i++) {
        if (a.lengths[i] < 1) return refused("at least 1 token in each sequence, got %d", (int)a.lengths[i]);
        longest = a.lengths[i] > longest ? a.lengths[i] : longest;
    }
    if (pairs && pairs < threads) a.splits = least((threads + pairs - 1) / pairs, (longest + TOKENS - 1) / TOKENS);
    a.part = a.shared * a.size + (a.shared + MOST_HEADS - 1) / MOST_HEADS * (Py_ssize_t)(sizeof(State) / sizeof *a.parts);
    a.parts = malloc((size_t)(pairs * a.splits * a.part) * sizeof *a.parts);
    if (!a.parts) return no_memory;
    append(&a, n->k, n->v, n->next_k, n->next_v);
    in_shares(attend_parts, &a, pairs * a.splits, 1, pairs * longest * a.size < SMALL ? 1 : (unsigned)threads);
    join(&a, n->y);
    free(a.parts);
    return NULL;
}

#endif
