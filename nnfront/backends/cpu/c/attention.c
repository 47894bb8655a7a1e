// SPDX-License-Identifier: Apache-2.0
// Attention of a few tokens of each sequence to a cache in bfloat16 or in 8 bits, which they are stored in before.
//
// Values may be the first features of the keys: so latent attention (DeepSeek-V2, 2024) reads what it has stored once for scores and sums.
//
// Keys and values are read once for all query heads that share them, a block of tokens at a time; the softmax is kept up to date from block
// to block (online softmax: Milakov and Gimelshein, 2018), so that nothing is as long as the sequence. What a query sees is divided into parts of a fixed
// number of tokens, which threads share and which are joined at the end. So the order of sums follows from how many tokens a query sees and from
// nothing else: not from threads, from other sequences, from tokens that are computed in the same call, nor from whether tokens lie in a row, in a ring or in pages.

#include <math.h>
#include <stdlib.h>

#include "float8.h"

enum {
    TOKENS = 128,     // of a block: its keys and values stay in the nearer caches
    PART = 256,       // tokens of a part
    MOST_CODED = 4096, // features of a key and a value in 8 bits: a block of them lies on the stack
    MOST_HEADS = 8,   // query heads of a key head at a time: their sums stay in registers
    MOST_VECTORS = 4, // of features at a time
    SMALL_CACHE = 1 << 14,  // features of keys that take less time than waking threads
};

// Where keys or values lie: [batch, groups, capacity, step], or [groups, pool, capacity, step] of pages of `capacity` tokens.
typedef struct {
    void *tokens;   // bfloat16, or float8 (e4m3fn) with a scale for each token and group
    float *scales;
    Py_ssize_t step;
} Buffer;

typedef struct {
    const uint16_t *q;         // [batch, tokens, groups, shared, size], tokens next_q elements apart
    Buffer keys, values;       // values without tokens are the first features of the keys
    const int32_t *pages;      // [batch, columns]: the page of each `capacity` tokens of a sequence; or NULL
    const int32_t *lengths;    // tokens of each sequence, the new ones among them
    const void *sinks;         // [groups, shared], float if is_wide_sinks, else bfloat16; or NULL
    const void *bias;          // [batch, groups, shared, tokens, positions], elements of bias_bytes, sequences, heads and tokens next_* apart; or NULL
    uint16_t *y;               // [batch, tokens, groups, shared, value_size]
    float *parts;              // [batch, groups, splits, tokens, part]: sums [shared, padded], and for each MOST_HEADS heads a State
    Py_ssize_t batch, tokens, groups, shared, size, value_size, padded, capacity, columns, pool, window, next_q, splits, part;
    Py_ssize_t bias_bytes, next_bias, next_bias_head, next_bias_token;
    bool has_wide_sinks;
    float scale, softcap;
} Attention;

// A block of tokens: where the key and the value of each are.
typedef struct {
    const uint16_t *keys[TOKENS], *values[TOKENS];
    Py_ssize_t first, count;
} Block;

// The greatest score until now, and the sum of the weights that are relative to it.
typedef struct {
    float greatest[MOST_HEADS], totals[MOST_HEADS];
} State;

INLINE State *state_of(const Attention *a, float *part, Py_ssize_t head) {
    return (State *)(part + a->shared * a->padded) + head / MOST_HEADS;
}

INLINE Py_ssize_t least(Py_ssize_t a, Py_ssize_t b) { return a < b ? a : b; }

// The sums of four vectors.
FAST INLINE Four four_sums(Floats a, Floats b, Floats c, Floats d) {
#if AVX512
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    const __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(abcd), 1));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), high);
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
    return (Four){total(a), total(b), total(c), total(d)};
#endif
}

// Add to `sums` what LANES features of a key, or the first `count` of them, contribute to its scores with `heads` queries.
FAST INLINE void add_features(Floats *sums, const uint16_t *key, const uint16_t *q, Py_ssize_t size, const int heads, const bool is_whole,
                     Py_ssize_t count) {
    const Words some = is_whole ? words(key) : first_words(key, count);
#pragma GCC unroll 8
    for (int head = 0; head < heads; head++) {
        const Words with = is_whole ? words(q + head * size) : first_words(q + head * size, count);
        sums[head] = dot(sums[head], some, with);
    }
}

// Scores of keys with `heads` queries, a constant wherever this is inlined.
FAST INLINE void score(float (*scores)[MOST_HEADS], const Attention *a, const uint16_t *q, const Block *b, const int heads) {
    const Py_ssize_t size = a->size, whole = size / LANES * LANES;
    for (Py_ssize_t token = 0; token < b->count; token++) {
        const uint16_t *key = b->keys[token], *value = b->values[token];
        Floats sums[MOST_HEADS];
#pragma GCC unroll 8
        for (int head = 0; head < MOST_HEADS; head++) sums[head] = all(0.0f);
        for (Py_ssize_t i = 0; i < whole; i += LANES) {
            __builtin_prefetch(value + i);  // wanted next
            add_features(sums, key + i, q + i, size, heads, true, 0);
        }
        if (whole < size) add_features(sums, key + whole, q + whole, size, heads, false, size - whole);
#pragma GCC unroll 2
        for (int head = 0; head < MOST_HEADS; head += 4) {
            Four four = {0};
            if (head < heads) four = four_sums(sums[head], sums[head + 1], sums[head + 2], sums[head + 3]) * a->scale;
            memcpy(scores[token] + head, &four, sizeof four);
        }
    }
}

// softcap * tanh(score / softcap), by tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|).
FAST INLINE void cap(float (*scores)[MOST_HEADS], Py_ssize_t tokens, float softcap) {
    float *all_scores = scores[0];
    for (Py_ssize_t i = 0; i < tokens * MOST_HEADS; i += FLOATS) {
        const Floats x = floats(all_scores + i), power = exponential(absolute(x) * (-2.0f / softcap));
        store(all_scores + i, with_sign(softcap * (1.0f - power) / (1.0f + power), x));
    }
}

// Add to the scores of `heads` heads what is given for the positions of the tokens.
static void add_bias(float (*scores)[MOST_HEADS], const Attention *a, Py_ssize_t sequence, Py_ssize_t token, Py_ssize_t first_head, const Block *b,
                     int heads) {
    for (int head = 0; head < heads; head++) {
        const Py_ssize_t at = sequence * a->next_bias + (first_head + head) * a->next_bias_head + token * a->next_bias_token;
        const char *row = (const char *)a->bias + (at + b->first) * a->bias_bytes;
        for (Py_ssize_t i = 0; i < b->count; i++) {
            if (a->bias_bytes == 4)
                scores[i][head] += ((const float *)row)[i];
            else if (a->bias_bytes == 2)
                scores[i][head] += widened(((const uint16_t *)row)[i]);
            else if (!row[i])
                scores[i][head] = -INFINITY;
        }
    }
}

// Turn scores into weights e^(score - greatest), count them in, and say by what the sums until now are to be multiplied.
FAST INLINE void weigh(float (*scores)[MOST_HEADS], Py_ssize_t tokens, State *state, float *kept) {
    // A vector holds the scores of two tokens, of one, or of half of one.
    enum { TURNS = VECTOR > sizeof(Eight) ? 2 : 1, PERIOD = TURNS * MOST_HEADS };
    float *all_scores = scores[0], from[PERIOD];
    float now[MOST_HEADS];
    memcpy(now, state->greatest, sizeof now);
    Eight sums = {0};
    for (Py_ssize_t token = 0; token < tokens; token++) {
        const Eight greatest = greater_of_eight(now, scores[token]);
        memcpy(now, &greatest, sizeof now);
    }
    // Where nothing was seen yet all weights are to be 0, not e^(minus infinity - minus infinity).
    for (int i = 0; i < PERIOD; i++) from[i] = now[i % MOST_HEADS] == -INFINITY ? 0.0f : now[i % MOST_HEADS];
    for (Py_ssize_t i = 0; i < tokens * MOST_HEADS; i += FLOATS)
        store(all_scores + i, exponential(floats(all_scores + i) - floats(from + i % PERIOD)));
    for (Py_ssize_t token = 0; token < tokens; token++) sums += eight(scores[token]);
    float by[PERIOD] = {0};
    memcpy(by, state->greatest, sizeof now);
    for (int i = 0; i < PERIOD; i += FLOATS) store(by + i, exponential(floats(by + i) - floats(from + i)));
    memcpy(kept, by, sizeof now);
    memcpy(state->greatest, now, sizeof now);
    sums += eight(state->totals) * eight(by);
    memcpy(state->totals, &sums, sizeof sums);
}

// Add weighted values to the sums of `heads` heads, `vectors` vectors of features, of the last of which `there` marks what there is; heads and
// vectors are constants wherever this is inlined.
FAST INLINE void gather(float *sums, const Attention *a, float (*weights)[MOST_HEADS], const float *kept, const Block *b, Py_ssize_t at,
                        const int heads, const int vectors, Lanes there) {
    Floats parts[MOST_HEADS * MOST_VECTORS];
#pragma GCC unroll 32
    for (int i = 0; i < heads * vectors; i++) {
        parts[i] = floats(sums + at + i / vectors * a->padded + i % vectors * FLOATS) * kept[i / vectors];
    }
    for (Py_ssize_t token = 0; token < b->count; token++) {
        const uint16_t *from = b->values[token] + at;
        Floats value[MOST_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            value[i] = widened_vector(from + i * FLOATS, i + 1 < vectors ? first_lanes(FLOATS) : there);
#pragma GCC unroll 32
        for (int i = 0; i < heads * vectors; i++)
            parts[i] = fused(all(weights[token][i / vectors]), value[i % vectors], parts[i]);
    }
#pragma GCC unroll 32
    for (int i = 0; i < heads * vectors; i++)
        store(sums + at + i / vectors * a->padded + i % vectors * FLOATS, parts[i]);
}

// Attend to a block of tokens with `heads` query heads from `head` of all on, a constant wherever this is inlined.
FAST INLINE void attend_block(float *sums, State *state, const Attention *a, const uint16_t *q, const Block *b, Py_ssize_t sequence, Py_ssize_t token,
                              Py_ssize_t head, const int heads) {
    const int wide = heads <= REGISTERS / 8 ? MOST_VECTORS : heads <= REGISTERS / 4 ? 2 : 1;
    const Py_ssize_t size = a->value_size;
    float scores[TOKENS][MOST_HEADS], kept[MOST_HEADS];
    score(scores, a, q, b, heads);
    if (a->softcap > 0.0f) cap(scores, b->count, a->softcap);
    if (a->bias) add_bias(scores, a, sequence, token, head, b, heads);
    weigh(scores, b->count, state, kept);
    Py_ssize_t i = 0;
    for (; i + wide * FLOATS <= size; i += wide * FLOATS) gather(sums, a, scores, kept, b, i, heads, wide, first_lanes(FLOATS));
    for (; i < size; i += FLOATS) gather(sums, a, scores, kept, b, i, heads, 1, first_lanes(size - i));
}

// Which token of `stored`, and of its scales, is that of a sequence and a key head at a position.
INLINE Py_ssize_t place_of(const Attention *a, Py_ssize_t sequence, Py_ssize_t group, Py_ssize_t position) {
    if (!a->pages) return (sequence * a->groups + group) * a->capacity + position % a->capacity;
    return (group * a->pool + a->pages[sequence * a->columns + position / a->capacity]) * a->capacity + position % a->capacity;
}

// The first position that a query sees which sees `length` tokens at most.
INLINE Py_ssize_t oldest(const Attention *a, Py_ssize_t length) {
    const Py_ssize_t window = a->window ? a->window : length, most = a->pages ? window : least(window, a->capacity);
    return length > most ? length - most : 0;
}

INLINE Py_ssize_t splits_of(const Attention *a, Py_ssize_t length) {
    const Py_ssize_t parts = (length - oldest(a, length) + PART - 1) / PART;
    return parts < 1 ? 1 : parts;
}

// A token in 8 bits as bfloat16.
FAST static void decode_token(uint16_t *to, const Buffer *stored, Py_ssize_t place) {
    const uint8_t *codes = (const uint8_t *)stored->tokens + place * stored->step;
    const float scale = stored->scales[place];
    for (Py_ssize_t i = 0; i < stored->step; i += FLOATS) {
        const Lanes there = first_lanes(stored->step - i);
        store_rounded(to + i, there, decoded(bytes_there(codes + i, there)) * scale);
    }
}

// Where a token is for a block, in bfloat16: in the cache, or decoded behind `scratch`, which moves on.
INLINE const uint16_t *token_at(const Buffer *stored, Py_ssize_t place, uint16_t **scratch) {
    if (!stored->scales) return (const uint16_t *)stored->tokens + place * stored->step;
    uint16_t *to = *scratch;
    decode_token(to, stored, place);
    *scratch += stored->step;
    return to;
}

// Find the tokens of a sequence and a key head from a position on.
static void find(Block *b, const Attention *a, Py_ssize_t sequence, Py_ssize_t group, Py_ssize_t first, Py_ssize_t count, uint16_t *scratch) {
    b->first = first, b->count = count;
    for (Py_ssize_t i = 0; i < count;) {
        Py_ssize_t place = place_of(a, sequence, group, first + i);
        const Py_ssize_t in_a_row = a->capacity - (first + i) % a->capacity, end = least(i + in_a_row, count);
        for (; i < end; i++, place++) {
            b->keys[i] = token_at(&a->keys, place, &scratch);
            b->values[i] = a->values.tokens ? token_at(&a->values, place, &scratch) : b->keys[i];
        }
    }
}

// Parts of what the new tokens of a sequence see of a key head, which lie next to each other: what one has read is near for the next.
FAST static void attend_parts(const void *attention, Py_ssize_t first, Py_ssize_t end) {
    const Attention *a = attention;
    uint16_t scratch[a->keys.scales ? TOKENS * (a->keys.step + a->values.step) : 1];
    Block b;
    for (Py_ssize_t at = first; at < end; at++) {
        const Py_ssize_t token = at % a->tokens, part_of = at / a->tokens % a->splits, pair = at / a->tokens / a->splits;
        const Py_ssize_t sequence = pair / a->groups, group = pair % a->groups;
        const Py_ssize_t length = a->lengths[sequence] - (a->tokens - 1 - token);
        const Py_ssize_t from = oldest(a, length) + part_of * PART, to = least(from + PART, length);
        if (part_of && from >= to) continue;
        const uint16_t *q = a->q + (sequence * a->tokens + token) * a->next_q + group * a->shared * a->size;
        float *part = a->parts + at * a->part;
        memset(part, 0, a->part * sizeof *part);
        for (Py_ssize_t head = 0; head < a->shared; head += MOST_HEADS)
            for (int i = 0; i < MOST_HEADS; i++) state_of(a, part, head)->greatest[i] = -INFINITY;
        for (Py_ssize_t position = from; position < to; position += TOKENS) {
            find(&b, a, sequence, group, position, least(TOKENS, to - position), scratch);
            for (Py_ssize_t head = 0; head < a->shared; head += MOST_HEADS) {
                float *sums = part + head * a->padded;
                State *state = state_of(a, part, head);
#define HEADS(count) \
    case count: attend_block(sums, state, a, q + head * a->size, &b, sequence, token, group * a->shared + head, count); break;
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
    const Py_ssize_t heads = a->groups * a->shared, next = a->tokens * a->part;
    for (Py_ssize_t at = first; at < end; at++, y += a->value_size) {
        const Py_ssize_t of_all = at % heads, head = of_all % a->shared, row = at / heads, sequence = row / a->tokens, token = row % a->tokens;
        const Py_ssize_t count = splits_of(a, a->lengths[sequence] - (a->tokens - 1 - token)), pair = sequence * a->groups + of_all / a->shared;
        float *parts = a->parts + (pair * a->splits * a->tokens + token) * a->part, *sums = parts + head * a->padded;
        float sink = -INFINITY, total = 0.0f;
        if (a->sinks) sink = a->has_wide_sinks ? ((const float *)a->sinks)[of_all] : widened(((const uint16_t *)a->sinks)[of_all]);
        float greatest = sink;
        for (Py_ssize_t s = 0; s < count; s++) {
            const float its = state_of(a, parts + s * next, head)->greatest[head % MOST_HEADS];
            if (!(its <= greatest)) greatest = its;
        }
        if (sink != -INFINITY) total = expf(sink - greatest);
        for (Py_ssize_t s = 0; s < count; s++) {
            const State *state = state_of(a, parts + s * next, head);
            const float its = state->greatest[head % MOST_HEADS], weight = its == -INFINITY ? 0.0f : expf(its - greatest);
            total += state->totals[head % MOST_HEADS] * weight;
            for (Py_ssize_t i = 0; i < a->value_size; i++) sums[i] = (s ? sums[i] : 0.0f) + sums[s * next + i] * weight;
        }
        for (Py_ssize_t i = 0; i < a->value_size; i++) y[i] = rounded(total == 0.0f ? 0.0f : sums[i] / total);
    }
}

// Store a token in 8 bits: its largest feature is the largest code.
static void encode_token(const Buffer *stored, Py_ssize_t place, const uint16_t *token) {
    const float largest = 448.0f;
    float most = 0.0f;
    for (Py_ssize_t i = 0; i < stored->step; i++) {
        const float size = fabsf(widened(token[i]));
        if (!(size <= most)) most = size;  // from a NaN on, all are
        if (most != most) break;
    }
    const float scale = most / largest == 0.0f ? 1.0f : most / largest;
    uint8_t *codes = (uint8_t *)stored->tokens + place * stored->step;
    for (Py_ssize_t i = 0; i < stored->step; i++) {
        const float value = widened(token[i]) / scale;
        codes[i] = coded(value > largest ? largest : value < -largest ? -largest : value);
    }
    stored->scales[place] = scale;
}

// Store the newest tokens of each sequence behind its others, or over the oldest: tokens [batch, tokens, groups, step], `next` elements apart.
static void append(const Attention *a, const Buffer *stored, const uint16_t *tokens, Py_ssize_t next) {
    for (Py_ssize_t row = 0; row < a->batch * a->tokens; row++)
        for (Py_ssize_t group = 0; group < a->groups; group++) {
            const Py_ssize_t sequence = row / a->tokens, position = a->lengths[sequence] - a->tokens + row % a->tokens;
            const Py_ssize_t place = place_of(a, sequence, group, position);
            const uint16_t *token = tokens + row * next + group * stored->step;
            if (stored->scales)
                encode_token(stored, place, token);
            else
                memcpy((uint16_t *)stored->tokens + place * stored->step, token, (size_t)stored->step * sizeof *token);
        }
}

// Why the tokens of a sequence are not where they should be, or NULL.
static const char *misplaced(const Attention *a, Py_ssize_t sequence, bool appends) {
    const Py_ssize_t length = a->lengths[sequence];
    if (length < a->tokens) return refused("at least %zd tokens in each sequence, got %d", a->tokens, (int)length);
    if (!a->pages) {
        const bool is_over = appends && a->tokens > 1 && length > a->capacity;
        return is_over ? refused("one token where newer ones lie over older ones, got %zd", a->tokens) : NULL;
    }
    if (length > a->columns * a->capacity) return refused("pages for %d tokens, got %zd", (int)length, a->columns);
    for (Py_ssize_t i = oldest(a, length - a->tokens + 1) / a->capacity; i * a->capacity < length; i++) {
        const int32_t page = a->pages[sequence * a->columns + i];
        if (page < 0 || page >= a->pool) return refused("pages below %zd, got %d", a->pool, (int)page);
    }
    return NULL;
}

static const char *append_and_attend(const struct append_and_attend *n) {
    Attention a = {
        .q = n->q, .keys = {n->keys, n->key_scales, n->size}, .values = {n->values, n->value_scales, n->values ? n->value_size : 0},
        .pages = n->pages, .lengths = n->lengths, .sinks = n->sinks, .bias = n->bias, .y = n->y,
        .batch = n->batch, .tokens = n->tokens, .groups = n->groups, .shared = n->shared, .size = n->size, .value_size = n->value_size,
        .padded = (n->value_size + FLOATS - 1) / FLOATS * FLOATS, .capacity = n->capacity, .columns = n->columns, .pool = n->pool,
        .window = n->window, .next_q = n->next_q, .splits = 1, .bias_bytes = n->bias_bytes, .next_bias = n->next_bias,
        .next_bias_head = n->next_bias_head, .next_bias_token = n->next_bias_token, .has_wide_sinks = n->has_wide_sinks != 0,
        .scale = (float)n->scale, .softcap = (float)n->softcap,
    };
    if (a.size < 1 || a.value_size < 1) return refused("heads of at least 1 feature, got %zd and %zd", a.size, a.value_size);
    if (!n->values && a.value_size > a.size) return refused("values of at most %zd features, got %zd", a.size, a.value_size);
    if (n->values ? !n->k != !n->v : n->v != NULL) return refused("a key with a value, a key whose first features are the value, or neither");
    if (a.keys.scales ? !n->values != !n->value_scales : n->value_scales != NULL) return refused("scales of keys and of values, or of neither");
    if (a.keys.scales && a.keys.step + a.values.step > MOST_CODED) return refused("at most %d features in 8 bits", MOST_CODED);
    if (a.bias && a.bias_bytes != 1 && a.bias_bytes != 2 && a.bias_bytes != 4) return refused("a bias of 1, 2 or 4 bytes, got %zd", a.bias_bytes);
    if (a.capacity < 1 || a.tokens < 1) return refused("a cache with room for a token");
    const Py_ssize_t pairs = a.batch * a.groups, threads = n->threads;
    Py_ssize_t longest = 0;
    for (Py_ssize_t i = 0; i < a.batch; i++) {
        const char *why = misplaced(&a, i, n->k != NULL);
        if (why) return why;
        longest = a.lengths[i] > longest ? a.lengths[i] : longest;
        for (Py_ssize_t token = 0; token < a.tokens; token++) {
            const Py_ssize_t parts = splits_of(&a, a.lengths[i] - token);
            a.splits = parts > a.splits ? parts : a.splits;
        }
    }
    if (a.bias && longest > n->positions) return refused("a bias for %zd positions, got %zd", longest, n->positions);
    a.part = a.shared * a.padded + (a.shared + MOST_HEADS - 1) / MOST_HEADS * (Py_ssize_t)(sizeof(State) / sizeof *a.parts);
    a.parts = malloc((size_t)(pairs * a.splits * a.tokens * a.part) * sizeof *a.parts);
    if (!a.parts) return no_memory;
    if (n->k) append(&a, &a.keys, n->k, n->next_k);
    if (n->v && n->values) append(&a, &a.values, n->v, n->next_v);
    const Py_ssize_t rows = pairs * a.tokens, heads = rows * a.shared;
    in_shares(attend_parts, &a, rows * a.splits, a.tokens, rows * longest * a.size < SMALL_CACHE ? 1 : (unsigned)threads);
    in_shares(join, &a, heads, 1, heads * a.value_size * a.splits < SMALL_CACHE ? 1 : (unsigned)threads);
    free(a.parts);
    return NULL;
}
