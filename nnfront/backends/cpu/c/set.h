// SPDX-License-Identifier: Apache-2.0
// All kernels for the instruction set of the file that includes this, and the table of them.

#include "words.h"

#if HAS_TILES
#include "tiles.c"

#include "quantized_tiles.c"

#include "many_rows_tiles.c"

#include "attention_tiles.h"
#else
#include "no_tiles.h"
#endif

#include "attention.c"
#include "elementwise.c"
#include "norm.c"
#include "products.c"
#include "quantized.c"
#include "recurrent.c"
#include "rope.c"
#include "rows.c"

#include "experts.c"
#include "heads.c"
#include "int8_product.c"

#include "embed.c"

#include "low_rank.c"

static bool runs(void) { return RUNS; }

#define KERNEL(name, arguments) name,
const Kernels KERNELS_OF(SET) = {
    TEXT(SET),
    NULL,
    runs,
    has_tiles,
#include "kernels.def"
};
