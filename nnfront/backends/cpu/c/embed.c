// SPDX-License-Identifier: Apache-2.0
// Rows of a matrix, those of some tokens; of a weight in few bits as bfloat16. Of a packed weight their words are brought together first.

enum {
    MOST_EMBEDDED = 1 << 16, // columns of a packed weight, a row of which lies on the stack
    LEAST_EMBEDDED = 1 << 14, // numbers that take less time than waking threads
};

// `bytes` of a row of a matrix of which words of OF_PANEL rows follow one another.
static void gather_row(uint8_t *to, const uint8_t *panels, Py_ssize_t row, Py_ssize_t bytes, const int word) {
    const uint8_t *from = panels + row / OF_PANEL * OF_PANEL * bytes + row % OF_PANEL * word;
    for (Py_ssize_t i = 0; i < bytes; i += word, from += OF_PANEL * word) memcpy(to + i, from, (size_t)word);
}

static const char *unknown_token(const int64_t *tokens, Py_ssize_t count, Py_ssize_t rows) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= rows) return refused("rows from 0 to %zd, got %lld", rows - 1, (long long)tokens[i]);
    return NULL;
}

static const char *take_rows(const struct take_rows *n) {
    const int64_t *tokens = n->tokens;
    const char *why = unknown_token(tokens, n->count, n->rows);
    for (Py_ssize_t i = 0; i < n->count && !why; i++) memcpy((char *)n->y + i * n->size, (const char *)n->x + tokens[i] * n->size, (size_t)n->size);
    return why;
}

// Tokens, by number.
FAST static void embed_tokens(const void *given, Py_ssize_t first, Py_ssize_t end) {
    const struct embed *n = given;
    const Stored how = (Stored)n->stored;
    const Quantized whole = WEIGHT_OF(n, 1);
    const Py_ssize_t scale = (Py_ssize_t)1 << scale_bytes_log2(whole.kind), of_scales = n->groups * scale, packed = n->is_packed ? n->outputs / OF_PANEL * OF_PANEL : 0;
    uint8_t row[packed ? whole.bytes : 1], zeros[packed ? n->groups : 1], scales[packed ? of_scales : 1] __attribute__((aligned(4)));
    for (; first < end; first++) {
        const int64_t token = ((const int64_t *)n->tokens)[first];
        Quantized one = whole;
        one.y = (uint16_t *)n->y + first * n->columns;
        if (token < packed) {
            gather_row(row, n->quantized, token, one.bytes, FOUR);
            gather_row(scales, n->scales, token, of_scales, (int)scale);
            if (how == UINT4_GROUPS) gather_row(zeros, n->zeros, token, n->groups, 1);
            one.quantized = row, one.scales = scales, one.zeros = zeros;
        } else {
            one.quantized += token * one.bytes;
            if (one.scales) one.scales = (const char *)one.scales + token * of_scales;
            if (how == UINT4_GROUPS) one.zeros += token * n->groups;
            if (one.factors) one.factors += token;
        }
        row_shares[how](&one, 0, 1);
    }
}

static const char *embed(const struct embed *n) {
    const Stored how = (Stored)n->stored;
    const char *why = unlike(how, n->stored, n->columns, n->groups, n->scale_kind);
    if (why) return why;
    if (n->is_packed && (in_blocks(how) || n->scale_kind > FLOAT_SCALES || bytes_of(how, n->columns) % FOUR || n->columns > MOST_EMBEDDED))
        return refused("a packed weight with scales that are floats, of up to %d columns in words of %d bytes, got %zd columns", MOST_EMBEDDED, FOUR, n->columns);
    why = unknown_token(n->tokens, n->count, n->outputs);
    if (why) return why;
    in_shares(embed_tokens, n, n->count, LEAST_EMBEDDED / (n->columns + 1) + 1, n->count * n->columns < LEAST_EMBEDDED ? 1 : (unsigned)n->threads);
    return NULL;
}
