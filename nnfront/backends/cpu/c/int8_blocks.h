// SPDX-License-Identifier: Apache-2.0
// Rows, rounded to 8 bits, times a weight in blocks as GGUF has them, one output after the other (part of `int8_product.c`).
//
// Rows are brought into the order in which a block is unpacked (`blocks.h`). What four neighbours add is multiplied with the scale of their group, as integers, so that each lane has one exact
// sum of a block, which d multiplies; lanes are added up behind the last block. Minima, and what values of 6 bits are more than numbers, are taken from sums of x over groups, which lie behind
// each block of a row. Few rows meet a block as it is unpacked, more of them outputs that were unpacked before: to the same bits.

enum {
    ROWS_OF_BLOCKS = REGISTERS == 32 ? 8 : MANY_REGISTERS ? 4 : 2,  // that are multiplied at once
    MOST_UNPACKED_ANEW = 6 * ROWS_OF_BLOCKS,   // rows for which blocks are unpacked again for each of these
    BLOCKS_UNPACKED = 8,                       // of each of FLOATS outputs, for more rows
    ROWS_OF_UNPACKED = 256,                    // whose sums are kept meanwhile
    BLOCKS_AHEAD = 4 << 10,                    // bytes of a weight that are fetched before they are needed
};

// What a block of an output is multiplied as: its quantised values, scales, what sums of groups are multiplied with, and d.
typedef struct {
    Bits values[BLOCK / VECTOR], scales[FACTORS / FLOATS], of_sums[FACTORS / FLOATS];
    float d;
} Unpacked;

// Factors in lanes as they are multiplied.
FAST INLINE Bits as_factors(Ints integers) {
#if AVX512
    return ((Bits)integers & 0xFFFF) | (Bits)integers << 16;
#elif AVX2
    return (Bits)_mm256_blend_epi16((__m256i)integers, (__m256i)((Bits)integers << 16), 0xAA);
#else
    return (Bits)integers;
#endif
}

// All of a block but its quantised values.
FAST INLINE void take_factors(const uint8_t *block, const Stored how, Unpacked *to) {
    uint8_t integers[FACTORS];
    integer_factors(block, how, integers);
    const Floats dmin = all(has_minima(how) ? -of_half(block + 2) : 0.0f);
#pragma GCC unroll 4
    for (int i = 0; i < FACTORS / FLOATS; i++) {
        const Ints of = factors_from(integers, how, i * FLOATS);
        if (!has_minima(how) || i * FLOATS < FACTORS / 2) to->scales[i] = as_factors(of);
        if (!has_minima(how)) to->of_sums[i] = to->scales[i];
        else if ((i + 1) * FLOATS > FACTORS / 2) to->of_sums[i] = (Bits)(__builtin_convertvector(of, Floats) * dmin);
    }
    to->d = d_of(block, how);
#if !AVX512
    __asm__("" : "+m"(to->scales));  // so that each is loaded into all lanes, which takes no instruction of vectors
#endif
}

// Add a block to the sums of some rows, `next` bytes apart. Its values are unpacked already where it is not given; of no rows they are written.
FAST INLINE void dot_block(const uint8_t *block, const Stored how, Unpacked *unpacked, const Rounded *x, Py_ssize_t next, Floats *sums, const int rows) {
    const Ints places = places_of(how);
    Ints dots[ROWS_OF_BLOCKS];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        dots[row] = (Ints){0};
#pragma GCC unroll 4
        for (int i = has_minima(how) ? FACTORS / 2 / FLOATS : 0; i < FACTORS / FLOATS; i++) {
            const Bits of_x = (Bits)floats(x + row * next + BLOCK + i * VECTOR);
            if (has_minima(how)) sums[row] = fused((Floats)unpacked->of_sums[i], (Floats)of_x, sums[row]);
            else dots[row] = plus_scaled(dots[row], unpacked->of_sums[i], of_x);
        }
    }
#pragma GCC unroll 8
    for (int vector = 0; vector < 2 * IN_HALF; vector++) {
        QuantizedVector both[2];
        if (block) quantized_of(block, how, vector / IN_HALF, vector % IN_HALF, both);
#pragma GCC unroll 2
        for (int is_high = 0; is_high < 2; is_high++) {
            const int at = 2 * vector + is_high;
            const Bits values = block ? (Bits)both[is_high] : unpacked->values[at];
            if (!rows) {
                unpacked->values[at] = values;
                continue;
            }
            const Bits scales = by_groups(unpacked->scales, how, vector / IN_HALF, vector % IN_HALF, is_high, places);
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                const Bits of_x = (Bits)floats(x + row * next + at * VECTOR);
#if AVX512 || AVX2
                dots[row] = plus_scaled(dots[row], scales, (Bits)pairs_of_bytes(values, of_x));
#else
                dots[row] = plus_scaled(dots[row], scales, (Bits)plus_fours((Ints){0}, values, of_x));
#endif
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) sums[row] = fused(all(unpacked->d), __builtin_convertvector(dots[row], Floats), sums[row]);
}

// Add the blocks `first` to `end` of output `at` to the sums of some rows. `unpacked` are these where they were unpacked before; of no rows it is where they are unpacked to.
FAST INLINE void dot_blocks(const Int8 *p, const Stored how, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, Unpacked *unpacked, const Rounded *x, Floats *sums, const int rows, const int ahead) {
    const uint8_t *from = (const uint8_t *)p->n->quantized + at * p->bytes + first * block_bytes(how);
    for (Py_ssize_t block = first; block < end; block++, from += block_bytes(how), x += BLOCK_OF_X) {
        if (rows && unpacked) {
            dot_block(NULL, how, unpacked++, x, p->next, sums, rows);
            continue;
        }
        uint8_t copy[MOST_BYTES];
        const uint8_t *found = whole_block(from, how, p->bytes - block * block_bytes(how), copy);
        Unpacked own, *to = rows ? &own : unpacked++;
#pragma GCC unroll 4
        for (int line = 0; line < block_bytes(how); line += 64) fetch(from + ahead + line);
        take_factors(found, how, to);
        dot_block(found, how, to, x, p->next, sums, rows);
    }
}

// The same of FLOATS outputs, for whose sums there are vectors [row, output].
FAST INLINE void dot_outputs(const Int8 *p, const Stored how, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, Unpacked (*unpacked)[BLOCKS_UNPACKED], Py_ssize_t row, Floats (*to)[FLOATS], const int rows) {
    for (int lane = 0; lane < FLOATS; lane++) {
        const Rounded *x = p->quantized + row * p->next + first * BLOCK_OF_X;
        Floats sums[ROWS_OF_BLOCKS];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) sums[i] = first ? to[i][lane] : all(0.0f);
        if (unpacked) dot_blocks(p, how, 0, first, end, unpacked[lane], x, sums, rows, BLOCKS_AHEAD);
        else dot_blocks(p, how, output_of(p, at, lane), first, end, NULL, x, sums, rows, BLOCKS_AHEAD);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) to[i][lane] = sums[i];
    }
}

// Make the sums of the rows `from` to `to` and of FLOATS outputs, [row, output].
FAST INLINE void sum_rows_of_blocks(const Int8 *p, const Stored how, Py_ssize_t at, Py_ssize_t from, Py_ssize_t to, Floats (*vectors)[FLOATS], float *sums) {
    const Py_ssize_t blocks = p->padded / BLOCK;
    const bool is_unpacked = p->n->rows > MOST_UNPACKED_ANEW;
    Unpacked unpacked[FLOATS][BLOCKS_UNPACKED];
    for (Py_ssize_t first = 0, end; first < blocks; first = end) {
        end = is_unpacked && blocks - first > BLOCKS_UNPACKED ? first + BLOCKS_UNPACKED : blocks;
        for (int lane = 0; is_unpacked && lane < FLOATS; lane++) dot_blocks(p, how, output_of(p, at, lane), first, end, unpacked[lane], NULL, NULL, 0, BLOCKS_AHEAD);
        for (Py_ssize_t row = from, rows; row < to; row += rows) {
            rows = to - row >= ROWS_OF_BLOCKS ? (Py_ssize_t)ROWS_OF_BLOCKS : to - row >= 4 ? 4 : to - row >= 2 ? 2 : 1;
            Floats (*of)[FLOATS] = vectors + (row - from);
#define ROWS(count) \
    case count: \
        if (is_unpacked) dot_outputs(p, how, at, first, end, unpacked, row, of, count); \
        else dot_outputs(p, how, at, first, end, NULL, row, of, count); \
        break;
            switch (rows) {
                ROWS(1) ROWS(2)
#if MANY_REGISTERS
                ROWS(4)
#endif
#if REGISTERS == 32
                ROWS(8)
#endif
            }
#undef ROWS
        }
    }
    for (Py_ssize_t row = 0; row < to - from; row++) store_totals(sums + row * FLOATS, vectors[row], FLOATS);
}

// Make the sums of one row and of vectors of outputs: a block of an output of each in turn.
FAST INLINE void sum_streams_of_blocks(const Int8 *p, const Stored how, const Py_ssize_t *at, float *sums) {
    Floats vectors[STREAMS][FLOATS] = {{{0}}};
    for (int lane = 0; lane < FLOATS; lane++)
        for (Py_ssize_t block = 0; block < p->padded / BLOCK; block++)
            for (int stream = 0; stream < STREAMS; stream++)
                dot_blocks(p, how, output_of(p, at[stream], lane), block, block + 1, NULL, p->quantized + block * BLOCK_OF_X, vectors[stream] + lane, 1, AHEAD_OF_STREAM);
    for (int stream = 0; stream < STREAMS; stream++) store_totals(sums + stream * FLOATS, vectors[stream], FLOATS);
}

// Vectors of outputs, by number.
FAST INLINE void outputs_of_blocks(const Int8 *p, const Stored how, Py_ssize_t vector, Py_ssize_t last, StreamSums *sums_of) {
    Floats vectors[ROWS_OF_UNPACKED][FLOATS];
    float sums[2][ROWS_OF_UNPACKED * FLOATS];
    for (vector = in_streams(p, p->n->rows == 1 ? STREAMS : 1, vector, last, FLOATS, sums_of); vector < last; vector++)
        for (Py_ssize_t from = 0; from < p->n->rows; from += ROWS_OF_UNPACKED) {
            const Py_ssize_t at = vector * FLOATS, to = p->n->rows - from < ROWS_OF_UNPACKED ? p->n->rows : from + ROWS_OF_UNPACKED;
            for (int half = 0; half <= is_gated(p->n); half++) sum_rows_of_blocks(p, how, half * p->n->outputs + at, from, to, vectors, sums[half]);
            finish_rows(p, at, from, to, sums[0], sums[1], FLOATS);
        }
}

#define OUTPUTS(how) \
    FAST static void streams_of_##how(const Int8 *p, const Py_ssize_t *at, float *sums) { sum_streams_of_blocks(p, how, at, sums); } \
    FAST static void outputs_of_##how(const void *given, Py_ssize_t vector, Py_ssize_t last) { outputs_of_blocks(given, how, vector, last, streams_of_##how); }
OUTPUTS(Q4_K) OUTPUTS(Q5_K) OUTPUTS(Q6_K)
#undef OUTPUTS

static Share outputs_of(const Stored how) { return how == Q4_K ? outputs_of_Q4_K : how == Q5_K ? outputs_of_Q5_K : outputs_of_Q6_K; }
