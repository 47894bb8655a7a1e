// SPDX-License-Identifier: Apache-2.0
// In the place of `tiles.c`, `quantized_tiles.c` and `many_rows_tiles.c` where there are no matrix tiles: what is asked first says so, and the rest is not called.

#include "product.h"

static bool has_tiles(void) { return false; }
static uint16_t *pack_for_tiles(const Product *p, const bool is_spread, uint16_t *packed) { return packed; }
static void outputs_by_tiles(const Product *p, Py_ssize_t at, Py_ssize_t end) {}
static void multiply_many_by_tiles(const Product *p, uint16_t *work, Py_ssize_t threads) {}
static bool takes_tiles(const struct multiply_quantized *n) { return false; }
static void multiply_quantized_by_tiles(const struct multiply_quantized *n) {}
static void multiply_dequantized_by_tiles(const struct multiply_dequantized *n) {}
