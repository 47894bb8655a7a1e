// SPDX-License-Identifier: Apache-2.0
// Rows, rounded to 8 bits, times a weight in the order of bytes by fours, by matrix tiles (part of `int8_product.c`).
//
// A tile is 16 rows of x as they lie, another 16 fours of columns of FLOATS outputs. Sums of a part are exact, so they are those that are made without tiles.

enum {
    LEAST_TILED = 8,  // rows for which that pays
    IN_TILE = 64,     // columns of a step; groups may have half as many
};

// Let tiles 0 and 1 be sums, 4 and 5 of x, 6 and 7 of a weight, which are multiplied by so many columns.
TILED INLINE void use_tiles_of(const int columns) {
    static const struct {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes[2] = {
        {.palette = 1, .bytes = {64, 64, 0, 0, 32, 32, 64, 64}, .rows = {SIDE, SIDE, 0, 0, SIDE, SIDE, 32 / FOUR, 32 / FOUR}},
        {.palette = 1, .bytes = {64, 64, 0, 0, 64, 64, 64, 64}, .rows = {SIDE, SIDE, 0, 0, SIDE, SIDE, SIDE, SIDE}},
    };
    _tile_loadconfig(&shapes[columns == IN_TILE]);
}

// The products of a part, whose columns begin at `x` and `weight`.
#define MULTIPLY_PART(tile, with, of_weight, to) \
    do { \
        _tile_zero(tile); \
        for (Py_ssize_t i = 0; i < steps; i++) { \
            _tile_loadd(with, x + i * IN_TILE, (int)p->padded); \
            _tile_loadd(of_weight, weight + i * SIDE, VECTOR); \
            _tile_dpbsud(tile, with, of_weight); \
        } \
        _tile_stored(tile, to, VECTOR); \
    } while (0)

// Add to the sums of 16 rows from one on, [row, output], what the columns `first` to `end` give. While products of a part are scaled, tiles make the next ones.
TILED INLINE void multiply_sixteen(const Int8 *p, const Bits *weight, const Floats *scales, const Floats *offsets, Py_ssize_t first, Py_ssize_t end, Py_ssize_t row, float *to,
                                const bool has_offsets) {
    Ints products[2][SIDE] __attribute__((aligned(64)));
    Floats sums[SIDE];
    const Py_ssize_t parts = (end - first + p->length - 1) / p->length, at = row * p->parts + first / p->length;
    const Py_ssize_t steps = ((end - first < p->length ? end - first : p->length) + IN_TILE - 1) / IN_TILE;  // a chunk has parts of one length
    const Rounded *x = p->quantized + row * p->padded + first;
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) sums[i] = first ? floats(to + i * FLOATS) : all(0.0f);
    MULTIPLY_PART(0, 4, 6, products[0]);
    for (Py_ssize_t part = 0; part < parts; part++) {
        x += p->length, weight += p->length / FOUR;
        if (part + 1 < parts) {
            if (part % 2) MULTIPLY_PART(0, 4, 6, products[0]);
            else MULTIPLY_PART(1, 5, 7, products[1]);
        }
        order_memory();
        const Floats scale = scales[part];
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) {
            const Py_ssize_t place = at + i * p->parts + part;
            Floats less;
            if (has_offsets) less = __builtin_convertvector(products[part % 2][i], Floats) - offsets[part] * all(p->sums[place]);
            else less = __builtin_convertvector(products[part % 2][i] + p->begins[place], Floats);
            sums[i] = fused(less, scale, sums[i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) store(to + i * FLOATS, sums[i]);
}
#undef MULTIPLY_PART

// Vectors of outputs, by number. The last 16 rows of many may be some of those before them as well.
TILED static void int8_outputs_by_tiles(const void *given, Py_ssize_t vector, Py_ssize_t last) {
    enum { BLOCKS = NEAR_ROWS / SIDE };
    const Int8 *p = given;
    const Py_ssize_t rows = p->n->rows, columns = p->n->columns, blocks = (rows + SIDE - 1) / SIDE, last_row = rows > SIDE ? rows - SIDE : 0;
    Bits weight[CHUNK / FOUR] __attribute__((aligned(64)));
    Floats scales[CHUNK / 32], offsets[CHUNK / 32];
    float sums[BLOCKS][SIDE * FLOATS];
    use_tiles_of(p->length < IN_TILE ? 32 : IN_TILE);
    for (; vector < last; vector++)
        for (Py_ssize_t from = 0; from < blocks; from += BLOCKS) {
            const Py_ssize_t at = vector * FLOATS, to = blocks - from < BLOCKS ? blocks : from + BLOCKS;
            for (Py_ssize_t first = 0; first < columns; first += CHUNK) {
                const Py_ssize_t end = columns - first < CHUNK ? columns : first + CHUNK;
                arrange_chunk(p, at, first, end, weight);
                factors_of_parts(p, at, first / p->length, (end + p->length - 1) / p->length, scales, offsets);
                order_memory();
                for (Py_ssize_t block = from; block < to; block++) {
                    const Py_ssize_t row = block * SIDE < last_row ? block * SIDE : last_row;
                    if (has_one_offset(p)) multiply_sixteen(p, weight, scales, offsets, first, end, row, sums[block - from], false);
                    else multiply_sixteen(p, weight, scales, offsets, first, end, row, sums[block - from], true);
                }
            }
            for (Py_ssize_t block = from; block < to; block++) {
                const Py_ssize_t row = block * SIDE < last_row ? block * SIDE : last_row;
                finish_rows(p, at, row, row + SIDE < rows ? row + SIDE : rows, sums[block - from]);
            }
        }
    _tile_release();
}
