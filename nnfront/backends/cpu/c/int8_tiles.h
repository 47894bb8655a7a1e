// SPDX-License-Identifier: Apache-2.0
// Rows, rounded to 8 bits, times a weight in the order of bytes by fours, by matrix tiles (part of `int8_product.c`).
//
// A tile is 16 rows of x, another 16 fours of columns of FLOATS outputs. Sums of a part are exact, so they are those that are made without tiles.

enum {
    LEAST_TILED = 8,  // rows for which that pays
    IN_TILE = 64,     // columns of a step; groups may have half as many
    TOGETHER = 4,     // vectors of outputs that are multiplied with rows of x while these are near
    FEW_TILED = 64,   // rows that are near anyway
};

// Let tiles 0 and 1 be sums, 4 and 5 of x, 6 and 7 of a weight, which are multiplied by half as many columns.
TILED INLINE void use_half_tiles(void) {
    static const Shapes half = {.palette = 1, .bytes = {64, 64, 0, 0, 32, 32, 64, 64}, .rows = {16, 16, 0, 0, 16, 16, 8, 8}};
    _tile_loadconfig(&half);
}

// The products of a part, whose columns begin at `x` and `weight`.
#define MULTIPLY_PART(tile, with, of_weight, part) \
    do { \
        const Rounded *from = x + (is_half ? (part) / 2 * IN_TILE * OF_TILE + (part) % 2 * IN_TILE / 2 : (part) * length * OF_TILE); \
        const Bits *by = weight + (part) * length / FOUR; \
        _tile_zero(tile); \
        for (size_t i = 0; i < steps; i++) { \
            _tile_loadd(with, from + i * IN_TILE * OF_TILE, IN_TILE); \
            _tile_loadd(of_weight, by + i * OF_TILE, VECTOR); \
            _tile_dpbsud(tile, with, of_weight); \
        } \
        _tile_stored(tile, products[(part) % AHEAD], VECTOR); \
    } while (0)

// Add to the sums of a block of rows from one on, [row, output], what the columns `first` to `end` give. While products of a part are scaled, tiles make those of others.
TILED INLINE void multiply_sixteen(const Int8 *p, const Bits *weight, const Floats *scales, const Floats *offsets, Py_ssize_t first, Py_ssize_t end, Py_ssize_t row, float *to,
                                   const bool has_offsets, const bool is_half) {
    enum { AHEAD = 4 };
    Ints products[AHEAD][OF_TILE] __attribute__((aligned(64)));
    Floats sums[OF_TILE];
    const size_t length = is_half ? IN_TILE / 2 : (size_t)p->length, columns = (size_t)(end - first), parts = (columns + length - 1) / length;
    const size_t steps = is_half ? 1 : ((columns < length ? columns : length) + IN_TILE - 1) / IN_TILE;  // a chunk has parts of one length
    const Py_ssize_t at = place_of_sum(p, row, first / p->length);
    const int32_t *begins = p->begins + at;
    const float *x_sums = p->sums + at;
    const Rounded *x = p->quantized + row * p->padded + first * OF_TILE;
#pragma GCC unroll 16
    for (int i = 0; i < OF_TILE; i++) sums[i] = first ? floats(to + i * FLOATS) : all(0.0f);
    MULTIPLY_PART(0, 4, 6, 0);
    if (parts > 1) MULTIPLY_PART(1, 5, 7, 1);
    for (size_t part = 0; part < parts; part++, begins += OF_TILE, x_sums += OF_TILE) {
        if (part + 2 < parts) {
            if (part % 2) MULTIPLY_PART(1, 5, 7, part + 2);
            else MULTIPLY_PART(0, 4, 6, part + 2);
        }
        order_memory();
        const Floats scale = scales[part];
#pragma GCC unroll 16
        for (int i = 0; i < OF_TILE; i++) {
            const Ints of = products[part % AHEAD][i];
            const Floats less = has_offsets ? __builtin_convertvector(of, Floats) - offsets[part] * all(x_sums[i]) : __builtin_convertvector(of + begins[i], Floats);
            sums[i] = fused(less, scale, sums[i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < OF_TILE; i++) store(to + i * FLOATS, sums[i]);
}
#undef MULTIPLY_PART

// Vectors of outputs, by number.
TILED static void int8_outputs_by_tiles(const void *given, Py_ssize_t vector, Py_ssize_t last) {
    const Int8 *p = given;
    const Py_ssize_t rows = p->n->rows, columns = p->n->columns;
    Bits weight[TOGETHER][CHUNK / FOUR] __attribute__((aligned(64)));
    Floats scales[TOGETHER][CHUNK / 32], offsets[TOGETHER][CHUNK / 32];
    float sums[TOGETHER][NEAR_ROWS * FLOATS];
    const int together = rows > FEW_TILED ? TOGETHER : 1;
    if (p->length < IN_TILE) use_half_tiles(); else use_whole_tiles();
    for (; vector < last; vector += together)
        for (Py_ssize_t from = 0; from < rows; from += NEAR_ROWS) {
            const Py_ssize_t to = rows - from < NEAR_ROWS ? rows : from + NEAR_ROWS;
            const int count = last - vector < together ? (int)(last - vector) : together;
            for (Py_ssize_t first = 0; first < columns; first += CHUNK) {
                const Py_ssize_t end = columns - first < CHUNK ? columns : first + CHUNK;
                for (int i = 0; i < count; i++) {
                    arrange_chunk(p, (vector + i) * FLOATS, first, end, weight[i]);
                    factors_of_parts(p, (vector + i) * FLOATS, first / p->length, (end + p->length - 1) / p->length, scales[i], offsets[i]);
                }
                order_memory();
                for (Py_ssize_t row = from; row < to; row += OF_TILE)
                    for (int i = 0; i < count; i++) {
                        float *of = sums[i] + (row - from) * FLOATS;
#define ROWS(has_offsets, is_half) multiply_sixteen(p, weight[i], scales[i], offsets[i], first, end, row, of, has_offsets, is_half)
                        if (p->length < IN_TILE && has_one_offset(p)) ROWS(false, true);
                        else if (p->length < IN_TILE) ROWS(true, true);
                        else if (has_one_offset(p)) ROWS(false, false);
                        else ROWS(true, false);
#undef ROWS
                    }
            }
            for (int i = 0; i < count; i++) finish_rows(p, (vector + i) * FLOATS, from, to, sums[i]);
        }
    _tile_release();
}
