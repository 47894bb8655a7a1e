// SPDX-License-Identifier: Apache-2.0
// Attention of one token of each sequence to a cache in bfloat16, which it is stored in before.
//
// Values may be the first features of the keys: so latent attention (DeepSeek-V2, 2024) reads what it has stored once for scores and sums.
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
    FLOATS = 16,      // in a vector
    MOST_VECTORS = 4, // of features at a time
    SMALL = 1 << 14,  // features of keys that take less time than waking threads
};

typedef struct {
    const uint16_t *q;         // [batch, groups, shared, size], sequences next_q elements apart
    uint16_t *keys, *values;   // [batch, groups, capacity, size and value_step]; values may be the first features of the keys
    const int32_t *lengths;    // tokens of each sequence, the new one among them
    const void *sinks;         // [groups, shared], float if is_wide_sinks, else bfloat16; or NULL
    const void *bias;          // [batch, groups, shared, positions], elements of bias_bytes, sequences and heads next_* apart; or NULL
    uint16_t *y;               // [batch, groups, shared, value_size]
    float *parts;              // [batch * groups, splits, part]: sums [shared, padded], and for each MOST_HEADS heads a State
    Py_ssize_t batch, groups, shared, size, value_size, value_step, padded, capacity, window, next_q, splits, part;
    Py_ssize_t bias_bytes, next_bias, next_bias_head;
    bool has_wide_sinks;
    float scale, softcap;
} Attention;

// The greatest score until now, and the sum of the weights that are relative to it.
typedef struct {
    float greatest[MOST_HEADS], totals[MOST_HEADS];
} State;

INLINE State *state_of(const Attention *a, float *part, Py_ssize_t head) {
    return (State *)(part + a->shared * a->padded) + head / MOST_HEADS;
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

// Add to `sums` what LANES features of a key, or those of them that `there` marks, contribute to its scores with `heads` queries.
FAST INLINE void add(__m512 *sums, const uint16_t *key, const uint16_t *q, Py_ssize_t size, const int heads, const bool is_whole,
                     __mmask32 there) {
    const __m512bh some = (__m512bh)(is_whole ? _mm512_loadu_si512(key) : _mm512_maskz_loadu_epi16(there, key));
#pragma GCC unroll 8
    for (int head = 0; head < heads; head++) {
        const __m512i with = is_whole ? _mm512_loadu_si512(q + head * size) : _mm512_maskz_loadu_epi16(there, q + head * size);
        sums[head] = _mm512_dpbf16_ps(sums[head], some, (__m512bh)with);
    }
}

// Scores of keys with `heads` queries, a constant wherever this is inlined.
FAST INLINE void score(float (*scores)[MOST_HEADS], const Attention *a, const uint16_t *q, const uint16_t *keys,
                       const uint16_t *values, Py_ssize_t tokens, const int heads) {
    const Py_ssize_t size = a->size, whole = size / LANES * LANES;
    const __mmask32 rest = ((__mmask32)1 << (size - whole)) - 1;
    for (Py_ssize_t token = 0; token < tokens; token++) {
        const uint16_t *key = keys + token * size, *value = values + token * a->value_step;
        __m512 sums[MOST_HEADS];
#pragma GCC unroll 8
        for (int head = 0; head < MOST_HEADS; head++) sums[head] = _mm512_setzero_ps();
        for (Py_ssize_t i = 0; i < whole; i += LANES) {
            _mm_prefetch((const char *)(value + i), _MM_HINT_T0);  // wanted next
            add(sums, key + i, q + i, size, heads, true, 0);
        }
        if (rest) add(sums, key + whole, q + whole, size, heads, false, rest);
#pragma GCC unroll 2
        for (int head = 0; head < MOST_HEADS; head += 4) {
            const __m128 four = head < heads ? four_sums(sums[head], sums[head + 1], sums[head + 2], sums[head + 3]) : _mm_setzero_ps();
            _mm_storeu_ps(scores[token] + head, _mm_mul_ps(four, _mm_set1_ps(a->scale)));
        }
    }
}

// softcap * tanh(score / softcap), by tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|).
FAST INLINE void cap(float (*scores)[MOST_HEADS], Py_ssize_t tokens, float softcap) {
    const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f), most = _mm512_set1_ps(softcap), twice = _mm512_set1_ps(-2.0f / softcap);
    for (Py_ssize_t token = 0; token < tokens; token += 2) {
        const __m512 x = _mm512_loadu_ps(scores[token]);
        const __m512 power = exponential(_mm512_mul_ps(_mm512_andnot_ps(sign, x), twice));
        const __m512 near = _mm512_div_ps(_mm512_mul_ps(most, _mm512_sub_ps(one, power)), _mm512_add_ps(one, power));
        _mm512_storeu_ps(scores[token], _mm512_or_ps(near, _mm512_and_ps(sign, x)));
    }
}

// Add to the scores of `heads` heads what is given for the positions of the tokens, which lie in slots from `slot` on.
static void add_bias(float (*scores)[MOST_HEADS], const Attention *a, Py_ssize_t sequence, Py_ssize_t first_head, Py_ssize_t slot,
                     Py_ssize_t tokens, int heads) {
    const Py_ssize_t length = a->lengths[sequence], turns = (length - 1) / a->capacity, newest = (length - 1) % a->capacity;
    for (int head = 0; head < heads; head++) {
        const char *row = (const char *)a->bias + (sequence * a->next_bias + (first_head + head) * a->next_bias_head) * a->bias_bytes;
        for (Py_ssize_t token = 0; token < tokens; token++) {
            const Py_ssize_t at = slot + token, position = at + (turns - (at > newest)) * a->capacity;
            if (a->bias_bytes == 4)
                scores[token][head] += ((const float *)row)[position];
            else if (a->bias_bytes == 2)
                scores[token][head] += widened(((const uint16_t *)row)[position]);
            else if (!row[position])
                scores[token][head] = -INFINITY;
        }
    }
}

// Turn scores into weights e^(score - greatest), count them in, and say by what the sums until now are to be multiplied.
FAST INLINE void weigh(float (*scores)[MOST_HEADS], Py_ssize_t tokens, State *state, float *kept) {
    const __m256 before = _mm256_loadu_ps(state->greatest), none = _mm256_set1_ps(-INFINITY);
    __m256 now = before, sums = _mm256_setzero_ps();
    for (Py_ssize_t token = 0; token < tokens; token++) now = _mm256_max_ps(now, _mm256_loadu_ps(scores[token]));
    // Where nothing was seen yet all weights are to be 0, not e^(minus infinity - minus infinity).
    const __m256 base = _mm256_blendv_ps(now, _mm256_setzero_ps(), _mm256_cmp_ps(now, none, _CMP_EQ_OQ));
    for (Py_ssize_t token = 0; token < tokens; token += 2) {
        const __m512 from = _mm512_broadcast_f32x8(base);
        const __m512 weights = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores[token]), from));
        _mm512_storeu_ps(scores[token], weights);
    }
    for (Py_ssize_t token = 0; token < tokens; token++) sums = _mm256_add_ps(sums, _mm256_loadu_ps(scores[token]));
    const __m256 by = _mm512_castps512_ps256(exponential(_mm512_castps256_ps512(_mm256_sub_ps(before, base))));
    _mm256_storeu_ps(kept, by);
    _mm256_storeu_ps(state->greatest, now);
    _mm256_storeu_ps(state->totals, _mm256_fmadd_ps(_mm256_loadu_ps(state->totals), by, sums));
}

// Add weighted values to the sums of `heads` heads, `vectors` vectors of features, of the last of which `there` marks what there is; heads and
// vectors are constants wherever this is inlined.
FAST INLINE void gather(float *sums, const Attention *a, float (*weights)[MOST_HEADS], const float *kept, const uint16_t *values,
                        Py_ssize_t tokens, const int heads, const int vectors, __mmask16 there) {
    __m512 parts[MOST_HEADS * MOST_VECTORS];
#pragma GCC unroll 32
    for (int i = 0; i < heads * vectors; i++) {
        const __m512 until_now = _mm512_loadu_ps(sums + i / vectors * a->padded + i % vectors * FLOATS);
        parts[i] = _mm512_mul_ps(until_now, _mm512_set1_ps(kept[i / vectors]));
    }
    for (Py_ssize_t token = 0; token < tokens; token++) {
        __m512 value[MOST_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            value[i] = widened_vector(values + token * a->value_step + i * FLOATS, i + 1 < vectors ? (__mmask16)-1 : there);
#pragma GCC unroll 32
        for (int i = 0; i < heads * vectors; i++)
            parts[i] = _mm512_fmadd_ps(_mm512_set1_ps(weights[token][i / vectors]), value[i % vectors], parts[i]);
    }
#pragma GCC unroll 32
    for (int i = 0; i < heads * vectors; i++)
        _mm512_storeu_ps(sums + i / vectors * a->padded + i % vectors * FLOATS, parts[i]);
}

// A block of tokens of a sequence in slots from `slot` on, and `heads` query heads from `head` of all on, a constant wherever this is inlined.
FAST INLINE void block(float *sums, State *state, const Attention *a, const uint16_t *q, const uint16_t *keys, const uint16_t *values,
                       Py_ssize_t sequence, Py_ssize_t head, Py_ssize_t slot, Py_ssize_t tokens, const int heads) {
    const int wide = heads <= 4 ? MOST_VECTORS : LANES / FLOATS;
    const Py_ssize_t size = a->value_size;
    float scores[TOKENS][MOST_HEADS], kept[MOST_HEADS];
    score(scores, a, q, keys, values, tokens, heads);
    if (a->softcap > 0.0f) cap(scores, tokens, a->softcap);
    if (a->bias) add_bias(scores, a, sequence, head, slot, tokens, heads);
    weigh(scores, tokens, state, kept);
    Py_ssize_t i = 0;
    for (; i + wide * FLOATS <= size; i += wide * FLOATS) gather(sums + i, a, scores, kept, values + i, tokens, heads, wide, (__mmask16)-1);
    for (; i < size; i += FLOATS) gather(sums + i, a, scores, kept, values + i, tokens, heads, 1, first_lanes(size - i));
}

// Pairs of a sequence and a key head, each in `splits` parts.
FAST static void attend_parts(const void *attention, Py_ssize_t first, Py_ssize_t end) {
    const Attention *a = attention;
    for (Py_ssize_t at = first; at < end; at++) {
        const Py_ssize_t pair = at / a->splits, sequence = pair / a->groups, group = pair % a->groups;
        const Py_ssize_t length = a->lengths[sequence], stored = least(length, a->capacity);
        // Where newer tokens lie over older ones, all that are stored are seen, and their order does not matter.
        const Py_ssize_t oldest = length == stored && a->window && length > a->window ? length - a->window : 0;
        const Py_ssize_t each = (stored - oldest + a->splits - 1) / a->splits;
        const Py_ssize_t from = oldest + at % a->splits * each, to = least(from + each, stored);
        const uint16_t *q = a->q + sequence * a->next_q + group * a->shared * a->size;
        const uint16_t *keys = a->keys + pair * a->capacity * a->size, *values = a->values + pair * a->capacity * a->value_step;
        float *part = a->parts + at * a->part;
        memset(part, 0, a->part * sizeof *part);
        for (Py_ssize_t head = 0; head < a->shared; head += MOST_HEADS)
            for (int i = 0; i < MOST_HEADS; i++) state_of(a, part, head)->greatest[i] = -INFINITY;
        for (Py_ssize_t token = from; token < to; token += TOKENS) {
            const Py_ssize_t tokens = least(TOKENS, to - token);
            for (Py_ssize_t head = 0; head < a->shared; head += MOST_HEADS) {
                float *sums = part + head * a->padded;
                State *state = state_of(a, part, head);
#define HEADS(count) \
    case count: \
        block(sums, state, a, q + head * a->size, keys + token * a->size, values + token * a->value_step, sequence, group * a->shared + head, \
              token, tokens, count); \
        break;
                switch (least(MOST_HEADS, a->shared - head)) {
                    HEADS(1) HEADS(2) HEADS(3) HEADS(4) HEADS(5) HEADS(6) HEADS(7) HEADS(8)
                }
#undef HEADS
            }
        }
    }
}

// The parts of heads, made relative to the greatest score of all; zeros where nothing is seen.
FAST static void join(const void *attention, Py_ssize_t first, Py_ssize_t end) {
    const Attention *a = attention;
    uint16_t *y = a->y + first * a->value_size;
    for (Py_ssize_t at = first; at < end; at++, y += a->value_size) {
        const Py_ssize_t head = at % a->shared, of_all = at % (a->groups * a->shared);
        float *parts = a->parts + at / a->shared * a->splits * a->part, *sums = parts + head * a->padded;
        float sink = -INFINITY, total = 0.0f;
        if (a->sinks) sink = a->has_wide_sinks ? ((const float *)a->sinks)[of_all] : widened(((const uint16_t *)a->sinks)[of_all]);
        float greatest = sink;
        for (Py_ssize_t s = 0; s < a->splits; s++) {
            const float its = state_of(a, parts + s * a->part, head)->greatest[head % MOST_HEADS];
            if (!(its <= greatest)) greatest = its;
        }
        if (sink != -INFINITY) total = expf(sink - greatest);
        for (Py_ssize_t s = 0; s < a->splits; s++) {
            const State *state = state_of(a, parts + s * a->part, head);
            const float its = state->greatest[head % MOST_HEADS], weight = its == -INFINITY ? 0.0f : expf(its - greatest);
            total += state->totals[head % MOST_HEADS] * weight;
            for (Py_ssize_t i = 0; i < a->value_size; i++) sums[i] = (s ? sums[i] : 0.0f) + sums[s * a->part + i] * weight;
        }
        for (Py_ssize_t i = 0; i < a->value_size; i++) y[i] = rounded(total == 0.0f ? 0.0f : sums[i] / total);
    }
}

// Store the newest token of each sequence behind its others, or over the oldest: tokens [batch, groups, size], sequences `next` elements apart.
static void append(const Attention *a, uint16_t *stored, const uint16_t *tokens, Py_ssize_t size, Py_ssize_t next) {
    for (Py_ssize_t pair = 0; pair < a->batch * a->groups; pair++) {
        const Py_ssize_t sequence = pair / a->groups, group = pair % a->groups;
        const Py_ssize_t to = (pair * a->capacity + (a->lengths[sequence] - 1) % a->capacity) * size;
        memcpy(stored + to, tokens + sequence * next + group * size, size * sizeof *tokens);
    }
}

const char *append_and_attend(const struct append_and_attend *n) {
    Attention a = {
        .q = n->q, .keys = n->keys, .values = n->values ? n->values : n->keys, .lengths = n->lengths, .sinks = n->sinks, .bias = n->bias, .y = n->y,
        .batch = n->batch, .groups = n->groups, .shared = n->shared, .size = n->size, .value_size = n->value_size,
        .value_step = n->values ? n->value_size : n->size, .padded = (n->value_size + FLOATS - 1) / FLOATS * FLOATS, .capacity = n->capacity,
        .window = n->window, .next_q = n->next_q, .splits = 1, .bias_bytes = n->bias_bytes, .next_bias = n->next_bias,
        .next_bias_head = n->next_bias_head, .has_wide_sinks = n->has_wide_sinks != 0, .scale = (float)n->scale, .softcap = (float)n->softcap,
    };
    if (a.size < 1 || a.value_size < 1) return refused("heads of at least 1 feature, got %zd and %zd", a.size, a.value_size);
    if (!n->values && a.value_size > a.size) return refused("values of at most %zd features, got %zd", a.size, a.value_size);
    if (n->values ? !n->k != !n->v : n->v != NULL) return refused("a key with a value, a key whose first features are the value, or neither");
    if (a.bias && a.bias_bytes != 1 && a.bias_bytes != 2 && a.bias_bytes != 4) return refused("a bias of 1, 2 or 4 bytes, got %zd", a.bias_bytes);
    if (a.capacity < 1) return refused("a cache with room for a token");
    const Py_ssize_t pairs = a.batch * a.groups, threads = n->threads;
    Py_ssize_t longest = 0;
    for (Py_ssize_t i = 0; i < a.batch; i++) {
        if (a.lengths[i] < 1) return refused("at least 1 token in each sequence, got %d", (int)a.lengths[i]);
        longest = a.lengths[i] > longest ? a.lengths[i] : longest;
    }
    if (a.bias && longest > n->positions) return refused("a bias for %zd positions, got %zd", longest, n->positions);
    if (pairs && pairs < threads) a.splits = least((threads + pairs - 1) / pairs, (longest + TOKENS - 1) / TOKENS);
    a.part = a.shared * a.padded + (a.shared + MOST_HEADS - 1) / MOST_HEADS * (Py_ssize_t)(sizeof(State) / sizeof *a.parts);
    a.parts = malloc((size_t)(pairs * a.splits * a.part) * sizeof *a.parts);
    if (!a.parts) return no_memory;
    if (n->k) append(&a, a.keys, n->k, a.size, n->next_k);
    if (n->v && n->values) append(&a, a.values, n->v, a.value_size, n->next_v);
    in_shares(attend_parts, &a, pairs * a.splits, 1, pairs * longest * a.size < SMALL ? 1 : (unsigned)threads);
    const Py_ssize_t heads = pairs * a.shared;
    in_shares(join, &a, heads, 1, heads * a.value_size * a.splits < SMALL ? 1 : (unsigned)threads);
    free(a.parts);
    return NULL;
}

#endif
