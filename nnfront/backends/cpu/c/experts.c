// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts for few tokens: each expert that was chosen multiplies its tokens, in the order of the experts.

#include "activation.h"
#include "product.h"

FAST static void add_share(float *sum, const uint16_t *share, float weight, Py_ssize_t size) {
    for (Py_ssize_t i = 0; i < size; i++) sum[i] += widened(share[i]) * weight;
}

// What an expert gives for choices of it, of which there are at most as many as tokens.
static const char *ask(const struct experts *n, Py_ssize_t expert, const Py_ssize_t *found, Py_ssize_t count) {
    const Py_ssize_t tokens = n->tokens, size = n->size, inner = n->inner;
    float *sums = n->work;
    uint16_t *rows = (uint16_t *)(sums + tokens * size), *hidden = rows + tokens * size, *shares = hidden + tokens * inner;
    for (Py_ssize_t i = 0; i < count; i++) memcpy(rows + i * size, (const uint16_t *)n->x + found[i] / n->top * size, (size_t)size * sizeof *rows);
    const struct multiply_gated first = {count, size, inner, n->activation, n->with_tiles, n->threads, (const uint16_t *)n->gate_up + expert * 2 * inner * size, rows, NULL, hidden};
    const struct multiply second = {count, inner, size, 0, NOTHING, n->with_tiles, n->threads, (const uint16_t *)n->down + expert * size * inner, hidden, NULL, NULL, shares};
    const char *why = multiply_gated(&first);
    if (!why) why = multiply(&second);
    for (Py_ssize_t i = 0; i < count && !why; i++) {
        const float weight = n->is_wide ? ((const float *)n->weights)[found[i]] : widened(((const uint16_t *)n->weights)[found[i]]);
        add_share(sums + found[i] / n->top * size, shares + i * size, weight, size);
    }
    return why;
}

static const char *experts(const struct experts *n) {
    const Py_ssize_t tokens = n->tokens, choices = tokens * n->top;
    if (tokens > MOST_ROWS) return refused("up to %d tokens, got %zd", MOST_ROWS, tokens);
    const int32_t *chosen = n->chosen;
    float *sums = n->work;
    memset(sums, 0, (size_t)(tokens * n->size) * sizeof *sums);
    for (Py_ssize_t expert = -1;;) {
        Py_ssize_t next = n->count, found[MOST_ROWS], count = 0;
        for (Py_ssize_t i = 0; i < choices; i++)
            if (chosen[i] > expert && chosen[i] < next) next = chosen[i];
        if (next == n->count) break;
        expert = next;
        for (Py_ssize_t i = 0; i < choices; i++) {
            if (chosen[i] == expert) found[count++] = i;
            if (count < tokens && i + 1 < choices) continue;
            const char *why = count ? ask(n, expert, found, count) : NULL;
            if (why) return why;
            count = 0;
        }
    }
    for (Py_ssize_t i = 0; i < tokens * n->size; i++) ((uint16_t *)n->y)[i] = rounded(sums[i]);
    return NULL;
}

// Heads of tokens, each with a matrix of its own: y = x weight^T, or x weight if it is turned.
typedef struct {
    const struct multiply_heads *n;
    Py_ssize_t parts;
} Heads;

enum { OUTPUTS_OF_HEAD = 64, LANES_OF_SUM = 16 };  // outputs that a thread takes at a time

FAST static void multiply_parts(const void *given, Py_ssize_t first, Py_ssize_t end) {
    const Heads *heads = given;
    const struct multiply_heads *n = heads->n;
    for (Py_ssize_t at = first; at < end; at++) {
        const Py_ssize_t head = at / heads->parts, from = at % heads->parts * OUTPUTS_OF_HEAD, count = n->outputs - from < OUTPUTS_OF_HEAD ? n->outputs - from : OUTPUTS_OF_HEAD;
        const uint16_t *matrix = (const uint16_t *)n->weight + head * n->outputs * n->columns;
        for (Py_ssize_t token = 0; token < n->tokens; token++) {
            const uint16_t *x = (const uint16_t *)n->x + (token * n->heads + head) * n->columns;
            uint16_t *y = (uint16_t *)n->y + (token * n->heads + head) * n->outputs + from;
            float sums[OUTPUTS_OF_HEAD] = {0};
            if (n->is_turned) {
                for (Py_ssize_t i = 0; i < n->columns; i++) {
                    const float value = widened(x[i]);
                    const uint16_t *row = matrix + i * n->outputs + from;
                    for (Py_ssize_t j = 0; j < count; j++) sums[j] += value * widened(row[j]);
                }
            } else {
                for (Py_ssize_t j = 0; j < count; j++) {
                    const uint16_t *row = matrix + (from + j) * n->columns;
                    float lanes[LANES_OF_SUM] = {0};
                    Py_ssize_t i = 0;
                    for (; i + LANES_OF_SUM <= n->columns; i += LANES_OF_SUM)
                        for (int k = 0; k < LANES_OF_SUM; k++) lanes[k] += widened(x[i + k]) * widened(row[i + k]);
                    for (; i < n->columns; i++) sums[j] += widened(x[i]) * widened(row[i]);
                    for (int k = 0; k < LANES_OF_SUM; k++) sums[j] += lanes[k];
                }
            }
            for (Py_ssize_t j = 0; j < count; j++) y[j] = rounded(sums[j]);
        }
    }
}

static const char *multiply_heads(const struct multiply_heads *n) {
    const Heads heads = {n, (n->outputs + OUTPUTS_OF_HEAD - 1) / OUTPUTS_OF_HEAD};
    in_shares(multiply_parts, &heads, n->heads * heads.parts, 1, (unsigned)n->threads);
    return NULL;
}
