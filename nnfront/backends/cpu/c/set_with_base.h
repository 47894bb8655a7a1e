// SPDX-License-Identifier: Apache-2.0
// The kernels that the file which includes this has in the place of its base's: products of bytes, and the table of them.

#include "words.h"

#pragma GCC diagnostic ignored "-Wunused-function"  // what kernels share is more than these need

static bool has_tiles(void) { return false; }

#include "int8_product.c"

static bool runs(void) { return RUNS && KERNELS_OF(BASE).runs(); }

const Kernels KERNELS_OF(SET) = {
    .set = TEXT(SET),
    .base = &KERNELS_OF(BASE),
    .runs = runs,
    .multiply_integers = multiply_integers,
};
