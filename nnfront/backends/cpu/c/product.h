// SPDX-License-Identifier: Apache-2.0
// Products of rows with a bfloat16 weight, and what is done with them: what `products.c` and `tiles.c` share.

#ifndef NNFRONT_PRODUCT_H
#define NNFRONT_PRODUCT_H

#include "activation.h"

enum { MOST_ROWS = 64 };  // of x, whose sums tiles hold at once

// y = activation(x @ weight.T + bias) + added; if it is gated, activation(that) * (x @ up.T + its bias), where up lies behind the weight.
typedef struct {
    const uint16_t *weight;  // [outputs, columns]
    const uint16_t *x;       // [rows, columns]
    const uint16_t *packed;  // x as tiles want it, or NULL where they are not used
    const uint16_t *bias;    // [outputs] or NULL
    const uint16_t *added;   // [rows, outputs] or NULL
    void *y;                 // [rows, outputs], float if is_wide, else bfloat16
    Py_ssize_t rows, columns, outputs;
    bool is_wide, is_gated;
    Activation activation;
} Product;

#endif
