// SPDX-License-Identifier: Apache-2.0
// Attention of tokens to a cache in bfloat16 or in 8 bits, which they are stored in before.
//
// Values may be the first features of the keys: so latent attention (DeepSeek-V2, 2024) reads what it has stored once for scores and sums.
//
// Queries that follow one another and read the same tokens are a run: they are of one sequence, or of rows whose pages are the same. All rows of a run, the heads of its
// queries that share a key head, attend to a block of its tokens together, in pieces that threads share. The order of sums follows from how many tokens a query sees, which
// begin at multiples of a block, and from nothing else: not from threads, from other queries, from tokens that are computed in the same call, nor from whether tokens lie in a
// row, in a ring or in pages.

#include "attention_block.h"
#include "float8.h"

enum {
    MOST_FEATURES = 4096,    // of a key and a value: a block of them lies on the stack
    PIECE_ROWS = 256,        // rows of a piece
    PIECE_SUMS = 1 << 15,    // sums of a piece, which the second cache holds beside a block
    PIECES = 4,              // for each thread: with fewer, blocks are shared
    STATES = 17,             // for each thread: what blocks leave when they are shared (`work` in kernels.def has room for them)
    SMALL_CACHE = 1 << 14,   // features of keys that take less time than waking threads
};

// Where keys or values lie: [batch, groups, capacity, step], or [groups, pool, capacity, step] of pages of `capacity` tokens.
typedef struct {
    void *tokens;   // bfloat16, or float8 (e4m3fn) with a scale for each token and group
    float *scales;
    Py_ssize_t step;
} Buffer;

// Rows of a run: of [queries, shared] those from `first` to `end`. The tokens that they see are where query `lead` finds them.
typedef struct {
    Py_ssize_t lead, first, end;
} Piece;

typedef struct {
    const uint16_t *q;         // [batch, tokens, groups, shared, size], tokens next_q elements apart
    Buffer keys, values;       // values without tokens are the first features of the keys
    const int32_t *pages;      // [batch, columns]: the page of each `capacity` tokens of a sequence; or NULL
    const int32_t *lengths;    // tokens of each sequence, the new ones among them
    const void *sinks;         // [groups, shared], float if is_wide_sinks, else bfloat16; or NULL
    const void *bias;          // [batch, groups, shared, tokens, positions], elements of bias_bytes, sequences, heads and tokens next_* apart; or NULL
    uint16_t *y;               // [batch, tokens, groups, shared, value_size]
    Py_ssize_t batch, tokens, groups, shared, size, value_size, padded, capacity, columns, pool, window, next_q;
    Py_ssize_t bias_bytes, next_bias, next_bias_head, next_bias_token;
    bool has_wide_sinks, is_tiled;
    float scale, softcap;
    Piece *pieces;
    Py_ssize_t rows;           // of a piece at most
    float *states;             // [pieces, groups, 1 + together, state]: what pieces have seen, and each of the blocks from `block` on; where threads share blocks
    Py_ssize_t blocks, block, together, state;
} Attention;

// Which positions a query sees, or some rows of a piece.
typedef struct {
    Py_ssize_t from, to;
} Seen;

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

// How many tokens a query sees, if it sees all.
INLINE Py_ssize_t length_of(const Attention *a, Py_ssize_t query) { return a->lengths[query / a->tokens] - (a->tokens - 1 - query % a->tokens); }

INLINE Seen seen_by_query(const Attention *a, Py_ssize_t query) {
    const Py_ssize_t to = length_of(a, query);
    return (Seen){oldest(a, to), to};
}

static Seen seen_by(const Attention *a, const Piece *p) {
    Seen seen = {PTRDIFF_MAX, 0};
    for (Py_ssize_t query = p->first / a->shared; query * a->shared < p->end; query++) {
        const Seen its = seen_by_query(a, query);
        seen = (Seen){least(seen.from, its.from), most(seen.to, its.to)};
    }
    return seen;
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

// Find the tokens of a sequence and a key head from `start` to `end` of a block.
static void find(Block *b, const Attention *a, Py_ssize_t sequence, Py_ssize_t group, Py_ssize_t first, Py_ssize_t start, Py_ssize_t end, uint16_t *scratch) {
    b->start = start, b->end = end;
    for (Py_ssize_t i = start; i < end;) {
        Py_ssize_t place = place_of(a, sequence, group, first + i);
        const Py_ssize_t in_a_row = a->capacity - (first + i) % a->capacity, until = least(i + in_a_row, end);
        for (; i < until; i++, place++) {
            b->keys[i] = token_at(&a->keys, place, &scratch);
            b->values[i] = a->values.tokens ? token_at(&a->values, place, &scratch) : b->keys[i];
        }
    }
}

// What a number of rows have seen, where it lies.
INLINE State state_at(const Attention *a, float *from, Py_ssize_t row) {
    return (State){from + row * a->padded, from + a->rows * a->padded + row, from + a->rows * (a->padded + 1) + row};
}

FAST static void empty(const Attention *a, float *state) {
    memset(state, 0, (size_t)a->state * sizeof *state);
    for (Py_ssize_t i = 0; i < a->rows; i++) state_at(a, state, i).greatest[0] = -INFINITY;
}

// What is added to the scores of a row from a position on.
INLINE const void *bias_of(const Attention *a, Py_ssize_t row, Py_ssize_t group, Py_ssize_t position) {
    const Py_ssize_t query = row / a->shared, head = group * a->shared + row % a->shared;
    const Py_ssize_t at = query / a->tokens * a->next_bias + head * a->next_bias_head + query % a->tokens * a->next_bias_token;
    return (const char *)a->bias + (at + position) * a->bias_bytes;
}

// The queries of rows as factors, `width` of each.
FAST static void take_queries(Factor *to, const Attention *a, const Piece *p, Py_ssize_t group, Py_ssize_t width) {
    for (Py_ssize_t row = p->first; row < p->end; row++, to += width) {
        const uint16_t *q = a->q + row / a->shared * a->next_q + (group * a->shared + row % a->shared) * a->size;
        memset(to + a->size, 0, (size_t)(width - a->size) * sizeof *to);
#if PAIRS
        memcpy(to, q, (size_t)a->size * sizeof *to);
#else
        for (Py_ssize_t i = 0; i < a->size; i++) to[i] = widened(q[i]);
#endif
    }
}

// What each row of a piece sees.
static void find_seen(Seen *to, const Attention *a, const Piece *p) {
    for (Py_ssize_t row = p->first; row < p->end;) {
        const Py_ssize_t query = row / a->shared, end = least(p->end, (query + 1) * a->shared);
        const Seen seen = seen_by_query(a, query);
        for (; row < end; row++) *to++ = seen;
    }
}

// The same of the block that begins at a position. Returns whether all see the same.
static bool find_parts(Part *to, const Seen *seen, Py_ssize_t rows, Py_ssize_t begin) {
    Py_ssize_t others = 0;
    for (Py_ssize_t i = 0; i < rows; i++) {
        const Py_ssize_t first = most(seen[i].from - begin, 0), end = least(seen[i].to - begin, TOKENS);
        to[i] = first < end ? (Part){first, end} : (Part){0, 0};
        others += to[i].first != to[0].first || to[i].end != to[0].end;
    }
    return !others;
}

// Attend with the rows of a piece to what they see in blocks of tokens.
FAST static void attend_piece(const Attention *a, const Piece *p, const Seen *seen, Py_ssize_t group, Py_ssize_t block, Py_ssize_t end, float *state) {
    const bool is_tiled = PAIRS && a->is_tiled;
    const Py_ssize_t width = rounded_up(a->size, is_tiled ? LANES : 2), rows = p->end - p->first;
    uint16_t scratch[a->keys.scales ? TOKENS * (a->keys.step + a->values.step) : 1];
    uint32_t keys[rounded_up(a->size, LANES) / 2 * TOKENS] __attribute__((aligned(64))), values[PAIRS ? TOKENS / 2 * a->padded : 1] __attribute__((aligned(64)));
    Factor queries[(rows + FLOATS - 1) * width] __attribute__((aligned(64)));  // tiles reach behind the last ones
    Seen seen_by_rows[rows];
    Part parts[rows];
    const void *bias[a->bias ? rows : 1];
    const bool is_plain = !(a->softcap > 0.0f) && !a->bias && a->scale > 0.0f;
    Block b;
    const Laid laid = {keys, values, width / 2, a->padded, rounded_up(a->size, LANES) / 2 * FLOATS, a->value_size, &b};
    take_queries(queries, a, p, group, width);
    find_seen(seen_by_rows, a, p);
    if (is_tiled) begin_tiles(rows);
    for (; block < end; block++) {
        const Py_ssize_t begin = block * TOKENS;
        const bool are_same = find_parts(parts, seen_by_rows, rows, begin);
        find(&b, a, p->lead / a->tokens, group, begin, most(seen->from - begin, 0), least(seen->to - begin, TOKENS), scratch);
        if (!is_tiled || rows > 1) lay_keys(&laid, &b, a->size);
        if (PAIRS) lay_values(&laid, &b, a->value_size);
        for (Py_ssize_t i = 0; a->bias && i < rows; i++) bias[i] = bias_of(a, p->first + i, group, begin);
        // By tiles a row has weights of 0 for what others see, which numbers are not changed by.
        const bool are_apart = !is_tiled || (!are_same && !are_numbers(&laid, b.start, b.end));
        for (Py_ssize_t row = 0, next; row < rows; row = next) {
            const Part *part = parts + row;
            for (next = row + 1; next < rows && !(are_apart && memcmp(part, parts + next, sizeof *part));) next++;
            const Scoring how = {a->scale, a->softcap, is_plain, a->bias ? bias + row : NULL, a->bias_bytes};
            if (is_tiled && rows == 1) {
                attend_row_by_tiles(state_at(a, state, row), queries, &b, a->size, &laid, &how);
            } else if (is_tiled) {
                if (are_apart) b.start = part->first, b.end = part->end, lay_values(&laid, &b, a->value_size);
                attend_by_tiles(state_at(a, state, row), queries + row * width, &laid, part, &how, next - row);
            } else if (part->first < part->end) {
                next = least(next, row + AT_ONCE);
                attend_block(state_at(a, state, row), queries + row * width, &laid, part->first, part->end, &how, next - row);
            }
        }
    }
    if (is_tiled) end_tiles();
}

// Divide the sums of rows by the sums of their weights, to which sinks are added; zeros where nothing is seen.
FAST static void divide(const Attention *a, const Piece *p, Py_ssize_t group, float *state) {
    const Py_ssize_t rows = rounded_up(p->end - p->first, FLOATS);
    float sinks[rows], ones[rows], kept[rows], added[rows];
    for (Py_ssize_t i = 0; i < rows; i++) {
        const Py_ssize_t head = group * a->shared + (p->first + i) % a->shared;
        sinks[i] = !a->sinks ? -INFINITY : a->has_wide_sinks ? ((const float *)a->sinks)[head] : widened(((const uint16_t *)a->sinks)[head]);
        ones[i] = 1.0f;
    }
    join_weights(state_at(a, state, 0), sinks, ones, kept, added, p->end - p->first);
    for (Py_ssize_t row = p->first; row < p->end; row++) {
        const State s = state_at(a, state, row - p->first);
        const Py_ssize_t head = group * a->shared + row % a->shared;
        uint16_t *y = a->y + (row / a->shared * a->groups * a->shared + head) * a->value_size;
        if (s.totals[0] == 0.0f) memset(s.sums, 0, (size_t)a->padded * sizeof *s.sums), s.totals[0] = 1.0f;
        for (Py_ssize_t i = 0; i < a->value_size; i += LANES) {
            const Floats even = floats(s.sums + i) * kept[row - p->first] / s.totals[0], odd = floats(s.sums + i + FLOATS) * kept[row - p->first] / s.totals[0];
            const Bits both = nearest_bits(even) | nearest_bits(odd) << 16;
            if (i + LANES <= a->value_size) memcpy(y + i, &both, sizeof both);
            else memcpy(y + i, &both, (size_t)(a->value_size - i) * sizeof *y);
        }
    }
}

// All that pieces see, [pieces, groups].
FAST static void attend_alone(const void *attention, Py_ssize_t first, Py_ssize_t end) {
    const Attention *a = attention;
    float state[a->state] __attribute__((aligned(64)));
    for (; first < end; first++) {
        const Piece *p = a->pieces + first / a->groups;
        const Seen seen = seen_by(a, p);
        empty(a, state);
        attend_piece(a, p, &seen, first % a->groups, seen.from / TOKENS, (seen.to + TOKENS - 1) / TOKENS, state);
        divide(a, p, first % a->groups, state);
    }
}

// One of the blocks that pieces see, [pieces, groups, together].
FAST static void attend_shared(const void *attention, Py_ssize_t first, Py_ssize_t end) {
    const Attention *a = attention;
    for (; first < end; first++) {
        const Py_ssize_t unit = first / a->together, which = first % a->together;
        const Piece *p = a->pieces + unit / a->groups;
        const Seen seen = seen_by(a, p);
        const Py_ssize_t block = seen.from / TOKENS + a->block + which;
        float *state = a->states + (unit * (1 + a->together) + 1 + which) * a->state;
        empty(a, state);
        if (block * TOKENS < seen.to) attend_piece(a, p, &seen, unit % a->groups, block, block + 1, state);
    }
}

// Join what the blocks of a piece have left, one after the other.
FAST static void join(const void *attention, Py_ssize_t first, Py_ssize_t end) {
    const Attention *a = attention;
    for (; first < end; first++) {
        const Piece *p = a->pieces + first / a->groups;
        float *state = a->states + first * (1 + a->together) * a->state, *next = state + a->state;
        if (!a->block) empty(a, state);
        for (Py_ssize_t i = 0; i < a->together; i++, next += a->state) {
            const Py_ssize_t rows = p->end - p->first;
            const State s = state_at(a, state, 0), other = state_at(a, next, 0);
            float kept[rounded_up(rows, FLOATS)], added[rounded_up(rows, FLOATS)];
            join_weights(s, other.greatest, other.totals, kept, added, rows);
            for (Py_ssize_t row = 0; row < rows; row++)
                for (Py_ssize_t j = row * a->padded; j < (row + 1) * a->padded; j += FLOATS)
                    store(s.sums + j, fused(floats(other.sums + j), all(added[row]), floats(s.sums + j) * kept[row]));
        }
        if (a->block + a->together >= a->blocks) divide(a, p, first % a->groups, state);
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

// Whether two queries see the same tokens, as far as both see them: they are of one sequence, or of rows whose pages are the same.
static bool are_one(const Attention *a, Py_ssize_t lead, Py_ssize_t query) {
    const Py_ssize_t one = lead / a->tokens, other = query / a->tokens, length = length_of(a, lead), its = length_of(a, query);
    if (one == other || !a->pages) return one == other;
    const Py_ssize_t from = least(oldest(a, length), oldest(a, its)) / a->capacity, to = (most(length, its) + a->capacity - 1) / a->capacity;
    const int32_t *pages = a->pages + from;
    return !memcmp(pages + one * a->columns, pages + other * a->columns, (size_t)(to - from) * sizeof *pages);
}

// Cut runs into pieces, as even as may be, and count them and how many rows and blocks they have at most.
static Py_ssize_t cut(Attention *a) {
    const Py_ssize_t queries = a->batch * a->tokens, rows = most(least(PIECE_ROWS, PIECE_SUMS / a->padded), AT_ONCE);
    Py_ssize_t count = 0;
    for (Py_ssize_t lead = 0, end; lead < queries; lead = end) {
        for (end = lead + 1; end < queries && are_one(a, lead, end);) end++;
        const Py_ssize_t all_rows = (end - lead) * a->shared, parts = (all_rows + rows - 1) / rows;
        for (Py_ssize_t part = 0; part < parts; part++) {
            const Piece p = {lead, lead * a->shared + all_rows * part / parts, lead * a->shared + all_rows * (part + 1) / parts};
            const Seen seen = seen_by(a, &p);
            a->pieces[count++] = p;
            a->rows = most(a->rows, p.end - p.first);
            a->blocks = most(a->blocks, (seen.to + TOKENS - 1) / TOKENS - seen.from / TOKENS);
        }
    }
    a->state = a->rows * (a->padded + 2);
    return count;
}

// Let threads share pieces, or, where these are few, their blocks.
static void attend(Attention *a, Py_ssize_t threads) {
    const Py_ssize_t queries = a->batch * a->tokens;
    if (!queries || !a->groups || !a->shared) return;
    const Py_ssize_t units = cut(a) * a->groups, blocks = a->blocks;
    const bool is_small = queries * a->groups * blocks * TOKENS * a->size < SMALL_CACHE;
    if (threads < 2 || is_small || units >= PIECES * threads || blocks < 2) {
        in_shares(attend_alone, a, units, 1, is_small ? 1 : (unsigned)threads);
    } else {
        a->together = least(blocks, STATES * threads / units - 1);
        a->states = (float *)(a->pieces + units / a->groups);
        for (; a->block < blocks; a->block += a->together) {
            in_shares(attend_shared, a, units * a->together, 1, (unsigned)threads);
            in_shares(join, a, units, 1, (unsigned)threads);
        }
    }
}

static const char *append_and_attend(const struct append_and_attend *n) {
    Attention a = {
        .q = n->q, .keys = {n->keys, n->key_scales, n->size}, .values = {n->values, n->value_scales, n->values ? n->value_size : 0},
        .pages = n->pages, .lengths = n->lengths, .sinks = n->sinks, .bias = n->bias, .y = n->y,
        .batch = n->batch, .tokens = n->tokens, .groups = n->groups, .shared = n->shared, .size = n->size, .value_size = n->value_size,
        .padded = rounded_up(n->value_size, LANES), .capacity = n->capacity, .columns = n->columns, .pool = n->pool,
        .window = n->window, .next_q = n->next_q, .bias_bytes = n->bias_bytes, .next_bias = n->next_bias,
        .next_bias_head = n->next_bias_head, .next_bias_token = n->next_bias_token, .has_wide_sinks = n->has_wide_sinks != 0,
        .scale = (float)n->scale, .softcap = (float)n->softcap, .pieces = n->work, .is_tiled = has_tiles(),
    };
    if (a.size < 1 || a.value_size < 1) return refused("heads of at least 1 feature, got %zd and %zd", a.size, a.value_size);
    if (!n->values && a.value_size > a.size) return refused("values of at most %zd features, got %zd", a.size, a.value_size);
    if (n->values ? !n->k != !n->v : n->v != NULL) return refused("a key with a value, a key whose first features are the value, or neither");
    if (a.keys.scales ? !n->values != !n->value_scales : n->value_scales != NULL) return refused("scales of keys and of values, or of neither");
    if (a.size + a.value_size > MOST_FEATURES) return refused("at most %d features of a key and a value, got %zd", MOST_FEATURES, a.size + a.value_size);
    if (a.bias && a.bias_bytes != 1 && a.bias_bytes != 2 && a.bias_bytes != 4) return refused("a bias of 1, 2 or 4 bytes, got %zd", a.bias_bytes);
    if (a.capacity < 1 || a.tokens < 1) return refused("a cache with room for a token");
    Py_ssize_t longest = 0;
    for (Py_ssize_t i = 0; i < a.batch; i++) {
        const char *why = misplaced(&a, i, n->k != NULL);
        if (why) return why;
        longest = most(longest, a.lengths[i]);
    }
    if (a.bias && longest > n->positions) return refused("a bias for %zd positions, got %zd", longest, n->positions);
    if (n->k) append(&a, &a.keys, n->k, n->next_k);
    if (n->v && n->values) append(&a, &a.values, n->v, n->next_v);
    attend(&a, n->threads);
    return NULL;
}
