// SPDX-License-Identifier: Apache-2.0
// One token of each sequence in what keeps a state: the causal convolution, the scan of Mamba-2, the gated delta rule.
//
// Each reads its state once or twice and writes the new one, in float; torch needs a dozen calls and as many passes. A state that is absent is zero.

#include <math.h>

#include "activation.h"

enum {
    CHANNELS = 256,    // of a convolution that a thread takes at a time
    USUAL_WIDTH = 4,   // taps of nearly all convolutions
    VECTORS = 4,       // of values at a time, which stay in registers
    MOST_KEYS = 1024,  // features of a key
    SMALL_STATE = 1 << 14,   // elements of a state that take less time than waking threads
};

// Element `i` of floats or, if not `is_wide`, of bfloat16.
INLINE float element(const void *from, bool is_wide, Py_ssize_t i) {
    return is_wide ? ((const float *)from)[i] : widened(((const uint16_t *)from)[i]);
}

// Sums of `count` channels from `from` on of a sequence, and what is kept of them; all but these are constants wherever this is inlined.
FAST INLINE void convolve_channels(const struct causal_conv1d_step *n, float *sums, Py_ssize_t begin, Py_ssize_t from, Py_ssize_t count,
                                   const Py_ssize_t width, const bool is_wide, const bool keeps_wide) {
    const Py_ssize_t kept = width - 1;
    const uint16_t *newest = (const uint16_t *)n->x + begin;
    for (Py_ssize_t i = 0; i < count; i++) sums[i] = n->bias ? element(n->bias, is_wide, from + i) : 0.0f;
    if (n->state)
        for (Py_ssize_t i = 0; i < count; i++)
#pragma GCC unroll 4
            for (Py_ssize_t t = 0; t < kept; t++)
                sums[i] += element(n->weight, is_wide, (from + i) * width + t) * element(n->state, keeps_wide, (begin + i) * kept + t);
    for (Py_ssize_t i = 0; i < count; i++) {
        sums[i] += element(n->weight, is_wide, (from + i) * width + kept) * widened(newest[i]);
#pragma GCC unroll 4
        for (Py_ssize_t t = 0; t < kept; t++) {
            const Py_ssize_t at = (begin + i) * kept + t;
            const float next = t + 1 == kept ? widened(newest[i]) : n->state ? element(n->state, keeps_wide, at + 1) : 0.0f;
            if (keeps_wide)
                ((float *)n->next)[at] = next;
            else
                ((uint16_t *)n->next)[at] = rounded(next);
        }
    }
}

FAST static void convolve(const void *given, Py_ssize_t first, Py_ssize_t end) {
    const struct causal_conv1d_step *n = given;
    const Py_ssize_t parts = (n->channels + CHANNELS - 1) / CHANNELS;
    for (Py_ssize_t at = first; at < end; at++) {
        const Py_ssize_t from = at % parts * CHANNELS, count = n->channels - from < CHANNELS ? n->channels - from : CHANNELS;
        const Py_ssize_t begin = at / parts * n->channels + from;
        float sums[CHANNELS + FLOATS];
#define KINDS(width) \
    switch ((n->is_wide ? 2 : 0) + (n->is_wide_state ? 1 : 0)) { \
        case 0: convolve_channels(n, sums, begin, from, count, width, false, false); break; \
        case 1: convolve_channels(n, sums, begin, from, count, width, false, true); break; \
        case 2: convolve_channels(n, sums, begin, from, count, width, true, false); break; \
        default: convolve_channels(n, sums, begin, from, count, width, true, true); \
    }
        if (n->width == USUAL_WIDTH)
            KINDS(USUAL_WIDTH)
        else
            KINDS(n->width)
#undef KINDS
        for (Py_ssize_t i = 0; i < count; i += FLOATS) {
            const Floats y = activated(floats(sums + i), (Activation)n->activation);
            store_rounded((uint16_t *)n->y + begin + i, first_lanes(count - i), y);
        }
    }
}

static const char *causal_conv1d_step(const struct causal_conv1d_step *n) {
    if (n->width < 1) return refused("a kernel with a tap");
    const Py_ssize_t parts = (n->channels + CHANNELS - 1) / CHANNELS;
    in_shares(convolve, n, n->batch * parts, 1, n->batch * n->channels * n->width < SMALL_STATE ? 1 : (unsigned)n->threads);
    return NULL;
}

// Heads of sequences: state = exp(dt * a) * state + dt * x b^T, y = state c + d * x.
FAST static void scan_heads(const void *given, Py_ssize_t first, Py_ssize_t end) {
    const struct ssm_scan_step *n = given;
    const Py_ssize_t states = n->states, shared = n->heads / n->groups;
    for (Py_ssize_t at = first; at < end; at++) {
        const Py_ssize_t sequence = at / n->heads, head = at % n->heads, group = (sequence * n->groups + head / shared) * states;
        const uint16_t *x = (const uint16_t *)n->x + at * n->size, *b = (const uint16_t *)n->b + group, *c = (const uint16_t *)n->c + group;
        const float dt = ((const float *)n->dt)[at], d = n->d ? ((const float *)n->d)[head] : 0.0f;
        const Floats left = all(expf(dt * ((const float *)n->a)[head]));
        for (Py_ssize_t i = 0; i < n->size; i++) {
            const Py_ssize_t row = (at * n->size + i) * states;
            const float value = widened(x[i]);
            const Floats into = all(dt * value);
            Floats sum = all(0.0f);
            for (Py_ssize_t j = 0; j < states; j += FLOATS) {
                const Lanes there = first_lanes(states - j);
                Floats now = into * widened_vector(b + j, there);
                if (n->state) now = fused(left, floats_there((const float *)n->state + row + j, there), now);
                store_there((float *)n->next + row + j, there, now);
                sum = fused(now, widened_vector(c + j, there), sum);
            }
            ((uint16_t *)n->y)[at * n->size + i] = rounded(total(sum) + d * value);
        }
    }
}

static const char *ssm_scan_step(const struct ssm_scan_step *n) {
    if (n->groups < 1 || n->heads % n->groups) return refused("heads that groups divide, got %zd and %zd", n->heads, n->groups);
    const Py_ssize_t heads = n->batch * n->heads;
    in_shares(scan_heads, n, heads, 1, heads * n->size * n->states < SMALL_STATE ? 1 : (unsigned)n->threads);
    return NULL;
}

// A query or a key in float, times `scale`, and divided by its norm if `is_normed`.
FAST INLINE void direct(const uint16_t *from, float *to, Py_ssize_t size, float scale, bool is_normed) {
    float squares = 0.0f;
    for (Py_ssize_t i = 0; i < size; i++) to[i] = widened(from[i]), squares += to[i] * to[i];
    if (is_normed) scale /= sqrtf(squares + 1e-6f);
    for (Py_ssize_t i = 0; i < size; i++) to[i] *= scale;
}

// Heads of sequences: state = exp(g) * state; state += k (beta * (v - k^T state))^T; y = scale * q^T state. Columns of the state do not know of one another.
FAST static void correct_heads(const void *given, Py_ssize_t first, Py_ssize_t end) {
    const struct gated_delta_rule_step *n = given;
    const Py_ssize_t keys = n->key_size, values = n->value_size, shared = n->heads / n->groups;
    float query[MOST_KEYS], key[MOST_KEYS], left[MOST_KEYS];
    for (Py_ssize_t at = first; at < end; at++) {
        const Py_ssize_t group = (at / n->heads * n->groups + at % n->heads / shared) * keys;
        const float *g = (const float *)n->g + at * (n->has_gates_of_keys ? keys : 1);
        direct((const uint16_t *)n->q + group, query, keys, (float)n->scale, n->is_normed);
        direct((const uint16_t *)n->k + group, key, keys, 1.0f, n->is_normed);
        for (Py_ssize_t i = 0; i < keys; i++) left[i] = n->has_gates_of_keys || !i ? expf(g[i]) : left[0];
        const Floats beta = all(((const float *)n->beta)[at]);
        for (Py_ssize_t from = 0; from < values; from += VECTORS * FLOATS) {
            Floats found[VECTORS], y[VECTORS];
            Lanes there[VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                const Py_ssize_t rest = values - from - j * FLOATS;
                there[j] = rest > 0 ? first_lanes(rest) : 0;
                found[j] = y[j] = all(0.0f);
            }
            const float *state = (const float *)n->state + at * keys * values + from;
            float *next = (float *)n->next + at * keys * values + from;
            for (Py_ssize_t i = 0; i < keys && n->state; i++)
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++) {
                    const Floats faded = floats_there(state + i * values + j * FLOATS, there[j]);
                    found[j] = fused(all(key[i] * left[i]), faded, found[j]);
                }
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                const Floats wanted = widened_vector((const uint16_t *)n->v + at * values + from + j * FLOATS, there[j]);
                found[j] = beta * (wanted - found[j]);
            }
            for (Py_ssize_t i = 0; i < keys; i++)
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++) {
                    Floats now = key[i] * found[j];
                    if (n->state) {
                        const Floats before = floats_there(state + i * values + j * FLOATS, there[j]);
                        now = fused(all(left[i]), before, now);
                    }
                    store_there(next + i * values + j * FLOATS, there[j], now);
                    y[j] = fused(all(query[i]), now, y[j]);
                }
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++)
                store_rounded((uint16_t *)n->y + at * values + from + j * FLOATS, there[j], y[j]);
        }
    }
}

static const char *gated_delta_rule_step(const struct gated_delta_rule_step *n) {
    if (n->groups < 1 || n->heads % n->groups) return refused("heads that groups divide, got %zd and %zd", n->heads, n->groups);
    if (n->key_size < 1 || n->key_size > MOST_KEYS) return refused("keys of 1 to %d features, got %zd", MOST_KEYS, n->key_size);
    const Py_ssize_t heads = n->batch * n->heads;
    in_shares(correct_heads, n, heads, 1, heads * n->key_size * n->value_size < SMALL_STATE ? 1 : (unsigned)n->threads);
    return NULL;
}
