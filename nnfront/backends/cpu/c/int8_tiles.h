// SPDX-License-Identifier: Apache-2.0
// Rows, rounded to 8 bits, times a weight in the order of bytes by fours, by matrix tiles (part of `int8_product.c`).
//
// A tile is 16 rows of x, another 16 fours of columns of FLOATS outputs, bytes with a sign, so that nothing is to be taken from sums but zero points. Sums of a part are exact, so they are
// those that are made without tiles.

enum {
    IN_TILE = 64,    // columns of a step; groups may have half as many
    TOGETHER = 8,    // vectors of outputs that are multiplied with rows of x while these are near
    FEW_TILED = 64,  // rows that are near anyway
};

// Let tiles 0 to 3 be sums, 4 and 5 of x, 6 and 7 of a weight, which are multiplied by half as many columns.
TILED INLINE void use_half_tiles(void) {
    static const Shapes half = {.palette = 1, .bytes = {64, 64, 64, 64, 32, 32, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 8, 8}};
    _tile_loadconfig(&half);
}

// The products of the next part of a vector of outputs.
#define MULTIPLY(tile, with, of_weight) \
    if (multiplied < all_parts) { \
        const Rounded *from = x + (is_half ? next / 2 * IN_TILE * OF_TILE + next % 2 * IN_TILE / 2 : next * length * OF_TILE); \
        const Bits *by = *weight + next * length / FOUR; \
        _tile_zero(tile); \
        for (size_t i = 0; i < steps; i++) { \
            _tile_loadd(with, from + i * IN_TILE * OF_TILE, IN_TILE); \
            _tile_loadd(of_weight, by + i * OF_TILE, VECTOR); \
            _tile_dpbssd(tile, with, of_weight); \
        } \
        multiplied++; \
        if (++next == parts) next = 0, weight++; \
    }

// A tile is stored some time after it was multiplied, and what it stores is loaded some time after that: neither waits.
#define TURN(tile, with, of_weight) \
    if (stored < all_parts) _tile_stored(tile, products[tile], VECTOR); \
    MULTIPLY(tile, with, of_weight) \
    order_memory(); \
    if (stored > 0) { \
        const Ints *of = products[(tile + SUMS - 1) % SUMS]; \
        _Pragma("GCC unroll 16") \
        for (int i = 0; i < OF_TILE; i++) { \
            Floats less = __builtin_convertvector(of[i], Floats); \
            if (has_zeros) less -= (*offsets)[part] * all(x_sums[part * OF_TILE + i]); \
            sums[i] = fused(less, (*scales)[part], sums[i]); \
        } \
        if (++part == parts) { \
            _Pragma("GCC unroll 16") \
            for (int i = 0; i < OF_TILE; i++) { \
                store(to + i * FLOATS, sums[i]); \
                sums[i] = first && stored < all_parts ? floats(to + (NEAR_ROWS + i) * FLOATS) : all(0.0f); \
            } \
            part = 0, to += NEAR_ROWS * FLOATS, scales++, offsets++; \
        } \
    } \
    if (stored++ == all_parts) break;

// Add to the sums of a block of rows from one on, [vector of outputs, row, output], what the columns `first` to `end` of `count` vectors of outputs give, or make them of the first ones.
TILED INLINE void multiply_sixteen(const Int8 *p, Bits (*weight)[CHUNK / FOUR], Floats (*scales)[CHUNK / 32], Floats (*offsets)[CHUNK / 32], size_t count, Py_ssize_t first, Py_ssize_t end,
                                   Py_ssize_t row, float *to, const bool has_zeros, const bool is_half) {
    enum { SUMS = 4 };
    Ints products[SUMS][OF_TILE] __attribute__((aligned(64)));
    Floats sums[OF_TILE];
    const size_t length = is_half ? IN_TILE / 2 : (size_t)p->length, columns = (size_t)(end - first), parts = (columns + length - 1) / length, all_parts = count * parts;
    const size_t steps = is_half ? 1 : ((columns < length ? columns : length) + IN_TILE - 1) / IN_TILE;  // a chunk has parts of one length
    const float *x_sums = p->sums + row * p->parts + first / p->length * OF_TILE;
    const Rounded *x = p->quantized + row * p->padded + first * OF_TILE;
    size_t multiplied = 0, next = 0, stored = 0, part = 0;
#pragma GCC unroll 16
    for (int i = 0; i < OF_TILE; i++) sums[i] = first ? floats(to + i * FLOATS) : all(0.0f);
    MULTIPLY(0, 4, 6) MULTIPLY(1, 5, 7) MULTIPLY(2, 4, 6) MULTIPLY(3, 5, 7)
    for (;;) {
        TURN(0, 4, 6) TURN(1, 5, 7) TURN(2, 4, 6) TURN(3, 5, 7)
    }
}
#undef MULTIPLY
#undef TURN

// Have the places of `count` vectors of outputs of the rows from `row` to `end` on come nearer: their pages are many.
TILED INLINE void fetch_results(const Int8 *p, Py_ssize_t vector, int count, Py_ssize_t row, Py_ssize_t end) {
    for (; row < end; row++)
        for (int i = 0; i < count; i += 2) __builtin_prefetch((const uint16_t *)p->n->y + row * p->n->outputs + (vector + i) * FLOATS, 1);
}

// Vectors of outputs, by number.
TILED static void int8_outputs_by_tiles(const void *given, Py_ssize_t vector, Py_ssize_t last) {
    const Int8 *p = given;
    const Py_ssize_t rows = p->n->rows, columns = p->n->columns;
    Bits weight[TOGETHER][CHUNK / FOUR] __attribute__((aligned(64)));
    Floats scales[TOGETHER][CHUNK / 32], offsets[TOGETHER][CHUNK / 32];
    float sums[TOGETHER][NEAR_ROWS * FLOATS];
    const int halves = 1 + is_gated(p->n), together = TOGETHER / halves;
    if (p->length < IN_TILE) use_half_tiles(); else use_whole_tiles();
    for (; vector < last; vector += together)
        for (Py_ssize_t from = 0; from < rows; from += NEAR_ROWS) {
            const Py_ssize_t to = rows - from < NEAR_ROWS ? rows : from + NEAR_ROWS;
            const int count = last - vector < together ? (int)(last - vector) : together, all_of = halves * count;  // gates, then what they are multiplied with
            const int at_once = rows > FEW_TILED ? all_of : 1;  // few rows read the weight in the order of memory
            for (int begin = 0; begin < all_of; begin += at_once)
                for (Py_ssize_t first = 0; first < columns; first += CHUNK) {
                    const Py_ssize_t end = columns - first < CHUNK ? columns : first + CHUNK;
                    const bool are_last = end == columns && begin + at_once == all_of;
                    for (int i = 0; i < at_once; i++) {
                        const Py_ssize_t at = (begin + i) / count * p->n->outputs + (vector + (begin + i) % count) * FLOATS;
                        arrange_chunk(p, at, first, end, weight[i]);
                        factors_of_parts(p, at, first, end, scales[i], offsets[i]);
                    }
                    order_memory();
                    for (Py_ssize_t row = from; row < to; row += OF_TILE) {
                        float *of = sums[0] + (row - from) * FLOATS;
                        const Py_ssize_t stop = to - row < OF_TILE ? to : row + OF_TILE;
                        if (are_last) fetch_results(p, vector, count, row, stop);
#define ROWS(has_zeros, is_half) multiply_sixteen(p, weight, scales, offsets, (size_t)at_once, first, end, row, of + begin * NEAR_ROWS * FLOATS, has_zeros, is_half)
                        if (p->length < IN_TILE && has_one_offset(p)) ROWS(false, true);
                        else if (p->length < IN_TILE) ROWS(true, true);
                        else if (has_one_offset(p)) ROWS(false, false);
                        else ROWS(true, false);
#undef ROWS
                        for (int i = 0; are_last && i < count; i++)
                            finish_rows(p, (vector + i) * FLOATS, row, stop, of + i * NEAR_ROWS * FLOATS, of + (halves - 1) * (count + i) * NEAR_ROWS * FLOATS, FLOATS);
                    }
                }
        }
    _tile_release();
}
