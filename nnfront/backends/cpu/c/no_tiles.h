// SPDX-License-Identifier: Apache-2.0
// In the place of `tiles.c`, `quantized_tiles.c`, `many_rows_tiles.c` and `attention_tiles.h` where there are no matrix tiles: what is asked first says so, and the rest is not called.

#include "attention_block.h"
#include "product.h"

static bool has_tiles(void) { return false; }
static uint16_t *pack_for_tiles(const Product *p, const bool is_spread, uint16_t *packed) { return packed; }
static void outputs_by_tiles(const Product *p, Py_ssize_t at, Py_ssize_t end) {}
static void multiply_many_by_tiles(const Product *p, uint16_t *work, Py_ssize_t threads) {}
static bool takes_tiles(const struct multiply_quantized *n) { return false; }
static void multiply_quantized_by_tiles(const struct multiply_quantized *n) {}
static void begin_tiles(Py_ssize_t rows) {}
static void end_tiles(void) {}
static void attend_row_by_tiles(State to, const Factor *q, const Block *block, Py_ssize_t size, const Laid *b, const Scoring *how) {}
static void attend_by_tiles(State to, const Factor *q, const Laid *b, const Part *parts, const Scoring *how, Py_ssize_t rows) {}
static void multiply_dequantized_by_tiles(const struct multiply_dequantized *n) {}
