// SPDX-License-Identifier: Apache-2.0
// Products of rows with a bfloat16 weight: what `products.c` and `tiles.c` share.

#ifndef NNFRONT_PRODUCT_H
#define NNFRONT_PRODUCT_H

#include "native.h"

typedef struct {
    const uint16_t *weight;  // [outputs, columns]
    const uint16_t *x;       // [rows, columns]
    const uint16_t *packed;  // x as tiles want it, or NULL where they are not used
    const uint16_t *bias;    // [outputs] or NULL
    const uint16_t *added;   // [rows, outputs] or NULL
    void *y;                 // [rows, outputs], float if is_wide, else bfloat16
    Py_ssize_t rows, columns, outputs;
    bool is_wide;
} Product;

// Whether the processor has tiles, and the system lets this process use them.
bool has_tiles(void);

// x as tiles want it, to be freed; NULL if there is no memory.
uint16_t *packed_for_tiles(const Product *p);

// Write `there` outputs from `at` on of all rows from their sums, [tiles, output, row], after bias and what is added.
void finish_tiles(const Product *p, const float *sums, Py_ssize_t at, int there);

// The outputs `at` to `end` of all rows.
void outputs_by_tiles(const Product *p, Py_ssize_t at, Py_ssize_t end);

#endif
