// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts for few tokens: all experts that were chosen multiply their tokens at once, so that threads wait for one another twice in all.

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

static void multiply_several(Product *products, Py_ssize_t count, uint16_t *packed, const struct experts *n) {
    for (Py_ssize_t i = 0; i < count; i++) packed = pack(products + i, n->with_tiles, packed);
    if (count) share_outputs(several_outputs, products, count * products->outputs, products->columns, n->threads);
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

static const char *experts(const struct experts *n) {
    const Py_ssize_t tokens = n->tokens, size = n->size, inner = n->inner, most = tokens * n->top;
    if (tokens > MOST_ROWS) return refused("up to %d tokens, got %zd", MOST_ROWS, tokens);
    if (size < 1 || inner < 1) return refused("matrices with elements");
    Product *products = n->work;
    Py_ssize_t *order = (Py_ssize_t *)(products + most);
    _Static_assert(sizeof *products + sizeof *order <= 88, "what the table says");
    float *sums = (float *)(order + most);
    uint16_t *rows = (uint16_t *)(sums + tokens * size), *hidden = rows + most * size, *packed = hidden + most * inner;
    const Py_ssize_t choices = sort_choices(n, order);
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
    multiply_several(products, count, packed, n);
    for (Py_ssize_t i = 0; i < count; i++) {
        Product *p = products + i;
        const Py_ssize_t expert = (p->weight - (const uint16_t *)n->gate_up) / (2 * inner * size);
        // What an expert gives is written over its tokens.
        *p = (Product){.weight = (const uint16_t *)n->down + expert * size * inner, .x = p->y, .y = (void *)p->x, .rows = p->rows, .columns = inner, .outputs = size, .activation = NOTHING};
    }
    multiply_several(products, count, packed, n);
    memset(sums, 0, (size_t)(tokens * size) * sizeof *sums);
    for (Py_ssize_t i = 0; i < choices; i++) {
        const float weight = n->is_wide ? ((const float *)n->weights)[order[i]] : widened(((const uint16_t *)n->weights)[order[i]]);
        add_share(sums + order[i] / n->top * size, rows + i * size, weight, size);
    }
    for (Py_ssize_t i = 0; i < tokens * size; i++) ((uint16_t *)n->y)[i] = rounded(sums[i]);
    return NULL;
}
