// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts for few tokens: all experts that were chosen multiply their tokens at once, so that threads wait for one another twice in all.

#include <stdlib.h>

#include "product.h"

// Products with weights of as many outputs each, as if these were one.
static void several_outputs(const void *products, Py_ssize_t at, Py_ssize_t end) {
    while (at < end) {
        const Product *first = products;
        const Py_ssize_t from = at % first->outputs, left = first->outputs - from, count = left < end - at ? left : end - at;
        product_outputs(first + at / first->outputs, from, from + count);
        at += count;
    }
}

static const char *multiply_several(Product *products, Py_ssize_t count, const struct experts *n) {
    const char *why = NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!pack(products + i, n->with_tiles)) why = no_memory;
    if (count && !why) share_outputs(several_outputs, products, count * products->outputs, products->columns, n->threads);
    for (Py_ssize_t i = 0; i < count; i++) free((void *)products[i].packed);
    return why;
}

FAST static void add_share(float *sum, const uint16_t *share, float weight, Py_ssize_t size) {
    for (Py_ssize_t i = 0; i < size; i++) sum[i] += widened(share[i]) * weight;
}

// Bring choices into the order of their experts, and those of one expert into that of the tokens; without those of an expert that is none. Returns how many there are.
static Py_ssize_t sort_choices(const struct experts *n, Py_ssize_t *order) {
    const int32_t *chosen = n->chosen;
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < n->tokens * n->top; i++) {
        if (chosen[i] < 0 || chosen[i] >= n->count) continue;
        Py_ssize_t at = count++;
        for (; at && chosen[order[at - 1]] > chosen[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    return count;
}

static const char *ask(const struct experts *n, Product *products, Py_ssize_t *order) {
    const Py_ssize_t tokens = n->tokens, size = n->size, inner = n->inner, choices = sort_choices(n, order);
    float *sums = n->work;
    uint16_t *rows = (uint16_t *)(sums + tokens * size), *hidden = rows + tokens * n->top * size;
    for (Py_ssize_t i = 0; i < choices; i++) memcpy(rows + i * size, (const uint16_t *)n->x + order[i] / n->top * size, (size_t)size * sizeof *rows);
    Py_ssize_t count = 0;
    for (Py_ssize_t first = 0, end; first < choices; first = end) {
        const Py_ssize_t expert = ((const int32_t *)n->chosen)[order[first]];
        for (end = first; end < choices && end - first < tokens && ((const int32_t *)n->chosen)[order[end]] == expert; end++) continue;
        products[count++] = (Product){
            .weight = (const uint16_t *)n->gate_up + expert * 2 * inner * size, .x = rows + first * size, .y = hidden + first * inner,
            .rows = end - first, .columns = size, .outputs = inner, .is_gated = true, .activation = (Activation)n->activation,
        };
    }
    const char *why = multiply_several(products, count, n);
    for (Py_ssize_t i = 0; i < count; i++) {
        Product *p = products + i;
        const Py_ssize_t expert = (p->weight - (const uint16_t *)n->gate_up) / (2 * inner * size);
        // What an expert gives is written over its tokens.
        *p = (Product){.weight = (const uint16_t *)n->down + expert * size * inner, .x = p->y, .y = (void *)p->x, .rows = p->rows, .columns = inner, .outputs = size, .activation = NOTHING};
    }
    if (!why) why = multiply_several(products, count, n);
    if (why) return why;
    memset(sums, 0, (size_t)(tokens * size) * sizeof *sums);
    for (Py_ssize_t i = 0; i < choices; i++) {
        const float weight = n->is_wide ? ((const float *)n->weights)[order[i]] : widened(((const uint16_t *)n->weights)[order[i]]);
        add_share(sums + order[i] / n->top * size, rows + i * size, weight, size);
    }
    for (Py_ssize_t i = 0; i < tokens * size; i++) ((uint16_t *)n->y)[i] = rounded(sums[i]);
    return NULL;
}

static const char *experts(const struct experts *n) {
    const Py_ssize_t choices = n->tokens * n->top;
    if (n->tokens > MOST_ROWS) return refused("up to %d tokens, got %zd", MOST_ROWS, n->tokens);
    if (n->size < 1 || n->inner < 1) return refused("matrices with elements");
    Product *products = malloc((size_t)(choices + 1) * sizeof *products);
    Py_ssize_t *order = malloc((size_t)(choices + 1) * sizeof *order);
    const char *why = products && order ? ask(n, products, order) : no_memory;
    free(products), free(order);
    return why;
}
