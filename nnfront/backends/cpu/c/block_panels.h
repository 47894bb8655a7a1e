// SPDX-License-Identifier: Apache-2.0
// Rows times a weight in blocks with minima (`blocks.h`), as many outputs at a time as a vector has floats (part of `quantized.c`).
//
// A block of each of these outputs is brought into a panel: words of four quantised values, one after the other, of an output in each lane, and scales and minima of all outputs in vectors. So x is the
// same in all lanes, sums of a group are scaled once for all outputs, and blocks are unpacked once for all rows. Of rows that are multiplied at a time x is brought into the order [block, number, row,
// neighbour], and behind each block lie sums of its groups [factor, row]. Sums of a row have one order, whatever rows are beside it.

enum {
    ROWS_OF_PART = 12,    // of x that are multiplied at a time: their sums, and those of a group, are in registers
    GROUP_OF_BLOCK = 32,  // columns
};

typedef struct {
    Bits words[BLOCK / 4];
    Floats factors[FACTORS];
} BlockPanel;

INLINE Py_ssize_t parts_of_rows(const Quantized *p) { return (p->usual + ROWS_OF_PART - 1) / ROWS_OF_PART; }

INLINE Py_ssize_t first_of_part(const Quantized *p, Py_ssize_t part) { return p->usual * part / parts_of_rows(p); }

INLINE Py_ssize_t blocks_of_row(const Quantized *p) { return (p->columns + BLOCK - 1) / BLOCK; }

// Where the rows of x from one on lie that are multiplied at a time.
INLINE Element *arranged_from(const Quantized *p, Py_ssize_t row) { return p->x + row * blocks_of_row(p) * BLOCK_ELEMENTS; }

// Bring parts of the rows of x into order, with the sums of groups as they are multiplied with factors.
FAST static void arrange_parts(const void *given, Py_ssize_t part, Py_ssize_t end) {
    const Quantized *p = given;
    for (; part < end; part++) {
        const Py_ssize_t first = first_of_part(p, part), rows = first_of_part(p, part + 1) - first;
        for (Py_ssize_t row = 0; row < rows; row++) {
            const uint16_t *x = p->plain + p->places[first + row] * p->columns;
            Element *to = arranged_from(p, first);
            for (Py_ssize_t begin = 0; begin < p->columns; begin += BLOCK, x += BLOCK, to += rows * BLOCK_ELEMENTS) {
                const int there = (int)least(p->columns - begin, BLOCK);
                float sums[FACTORS] = {0};
                for (int column = 0; column < BLOCK; column += 4)
                    for (int k = 0; k < 2; k++)
                        for (int i = 0; i < 2; i++) to[((column / 2 + k) * rows + row) * 2 + i] = column < there ? x[column + k + 2 * i] : 0;
                for (int column = 0; column < there; column++) {
                    const float value = widened(x[column]);
                    sums[column / GROUP_OF_BLOCK] -= MORE * value, sums[FACTORS / 2 + column / GROUP_OF_BLOCK] -= value;
                }
                for (int i = 0; i < FACTORS; i++) memcpy(to + rows * BLOCK + (i * rows + row) * 2, sums + i, sizeof *sums);
            }
        }
    }
}

// The words from a byte of each block on, a multiple of four: each of all blocks in a vector.
FAST INLINE void words_from(const uint8_t *const *blocks, const int byte, const int count, Bits *to) {
#pragma GCC unroll 4
    for (int word = 0; word < count; word += 4) {
        Bits of[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m512i some = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(blocks[i] + byte + 4 * word)));
            some = _mm512_inserti32x4(some, _mm_loadu_si128((const __m128i *)(blocks[4 + i] + byte + 4 * word)), 1);
            some = _mm512_inserti32x4(some, _mm_loadu_si128((const __m128i *)(blocks[8 + i] + byte + 4 * word)), 2);
            of[i] = (Bits)_mm512_inserti32x4(some, _mm_loadu_si128((const __m128i *)(blocks[12 + i] + byte + 4 * word)), 3);
        }
        const Bits a = first_pairs(of[0], of[1]), b = last_pairs(of[0], of[1]), c = first_pairs(of[2], of[3]), d = last_pairs(of[2], of[3]);
        to[word] = first_halves(a, c), to[word + 1] = last_halves(a, c), to[word + 2] = first_halves(b, d), to[word + 3] = last_halves(b, d);
    }
}

// 16-bit floats of all lanes.
FAST INLINE Floats of_halves(Bits halves) { return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)halves)); }

// The factors of blocks, one after the other: each of all blocks in a vector.
FAST INLINE void panel_factors(const uint8_t *const *blocks, Floats *to) {
    Bits head[4];
    words_from(blocks, 0, 4, head);
    const Floats scale = of_halves(head[0]), minimum = of_halves(head[0] >> 16);
    const Bits integers[4] = {head[1] & 0x3F3F3F3F, (head[3] & 0x0F0F0F0F) | (head[1] >> 2 & 0x30303030), head[2] & 0x3F3F3F3F, (head[3] >> 4 & 0x0F0F0F0F) | (head[2] >> 2 & 0x30303030)};
#pragma GCC unroll 16
    for (int i = 0; i < FACTORS; i++) to[i] = __builtin_convertvector((Ints)(integers[i / 4] >> i % 4 * 8 & 255), Floats) * (i < FACTORS / 2 ? scale : minimum);
}

FAST INLINE void make_block_panel(const uint8_t *const *blocks, const Stored how, BlockPanel *to) {
    Bits nibbles[NIBBLES / 4], above[GROUP_OF_BLOCK / 4];
    panel_factors(blocks, to->factors);
    if (how == Q5_K) words_from(blocks, above_at(how, 0), GROUP_OF_BLOCK / 4, above);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        words_from(blocks, nibbles_at(how) + half * NIBBLES, NIBBLES / 4, nibbles);
#pragma GCC unroll 16
        for (int i = 0; i < NIBBLES / 4; i++)
#pragma GCC unroll 2
            for (int is_high = 0; is_high < 2; is_high++) {
                const int column = half * HALF + column_of(how, 4 * i, is_high), group = column / GROUP_OF_BLOCK;
                Bits bytes = nibbles[i] >> 4 * is_high & 0x0F0F0F0F;
                if (how == Q5_K) bytes |= (group < 4 ? above[i % 8] << (4 - group) : above[i % 8] >> (group - 4)) & 0x10101010;
                to->words[column / 4] = bytes;
            }
    }
}

// How many groups are summed side by side, so that products of few rows do not wait for one another.
INLINE int groups_at_once(const int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : rows <= 5 ? 2 : 1; }

// Add to the sums of some rows, each behind the other by `next`, what a panel contributes.
FAST INLINE void add_block_panel(const BlockPanel *panel, const Element *x, float *to, const Py_ssize_t next, const int rows) {
    const int words = GROUP_OF_BLOCK / 4, each = groups_at_once(rows), apart = GROUP_OF_BLOCK * rows;
    const Element *of_groups = x + rows * BLOCK;
    Floats sums[ROWS_OF_PART];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) sums[row] = all(0.0f);
#pragma GCC unroll 4
    for (int i = 0; i < FACTORS; i++, of_groups += 2 * rows)
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            float sum;
            memcpy(&sum, of_groups + 2 * row, sizeof sum);
            sums[row] = fused(panel->factors[i], all(sum), sums[row]);
        }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) sums[row] += floats(to + row * next);
#pragma GCC unroll 1
    for (int group = 0; group < BLOCK / GROUP_OF_BLOCK; group += each, x += (each - 1) * apart) {
        Floats parts[ROWS_OF_PART];
#pragma GCC unroll 12
        for (int i = 0; i < each * rows; i++) parts[i] = all(0.0f);
#pragma GCC unroll 1
        for (int i = 0; i < words; i++, x += 4 * rows)
#pragma GCC unroll 8
            for (int j = 0; j < each; j++) {
                const Bits found = (Bits)held(panel->words + (group + j) * words + i);
#pragma GCC unroll 2
                for (int k = 0; k < 2; k++) {
                    const __m512i some = _mm512_ternarylogic_epi32((__m512i)(found >> 8 * k), _mm512_set1_epi16(0xFF), _mm512_set1_epi16(0x4300), 0xEA);  // MORE + a number
#pragma GCC unroll 12
                    for (int row = 0; row < rows; row++) {
                        int32_t both;
                        memcpy(&both, x + j * apart + 2 * (k * rows + row), sizeof both);
                        parts[j * rows + row] = _mm512_dpbf16_ps(parts[j * rows + row], (__m512bh)some, (__m512bh)_mm512_set1_epi32(both));
                    }
                }
            }
#pragma GCC unroll 8
        for (int j = 0; j < each; j++)
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++) sums[row] = fused(parts[j * rows + row], panel->factors[group + j], sums[row]);
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) store(to + row * next, sums[row]);
}

// The outputs `at` to `end`.
FAST INLINE void outputs_by_panels(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t end) {
    const Py_ssize_t blocks = blocks_of_row(p), bytes = block_bytes(how);
    const uint8_t *const behind = p->quantized + p->outputs * p->bytes;
    Totals totals;
    for (; at < end; at += FLOATS) {
        const int count = (int)least(end - at, FLOATS);
        const uint8_t *next[FLOATS];
        for (int lane = 0; lane < FLOATS; lane++) next[lane] = p->quantized + least(at + lane, p->outputs - 1) * p->bytes;
        for (Py_ssize_t row = 0; row < p->usual; row++) store(totals[row], all(0.0f));
        for (Py_ssize_t block = 0; block < blocks; block++) {
            const uint8_t *from[FLOATS];
            uint8_t copies[FLOATS][MOST_BYTES];
            BlockPanel panel;
            for (int lane = 0; lane < FLOATS; lane++) {
                from[lane] = whole_block(next[lane], how, behind - next[lane], copies[lane]);  // what lies behind half a block, if it is not the last one, meets zeros
#pragma GCC unroll 4
                for (int line = 0; line < bytes; line += LINE) __builtin_prefetch(next[lane] + FLOATS * p->bytes + line, 0, 2);  // of the next outputs
                next[lane] += bytes;
            }
            make_block_panel(from, how, &panel);
            for (Py_ssize_t part = 0; part < parts_of_rows(p); part++) {
                const Py_ssize_t first = first_of_part(p, part), rows = first_of_part(p, part + 1) - first;
                const Element *x = arranged_from(p, first) + block * rows * BLOCK_ELEMENTS;
#define ROWS(count) case count: add_block_panel(&panel, x, totals[first], sizeof *totals / sizeof **totals, count); break;
                switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) }
#undef ROWS
            }
        }
        for (Py_ssize_t row = p->usual; row < p->rows; row++)
            for (int i = 0; i < count; i++) totals[row][i] = sum_blocks(p, how, at + i, p->plain + p->places[row] * p->columns);
        finish(p, how, at, count, totals);
    }
}

#define OUTPUTS(how) \
    FAST static void quantized_outputs_##how(const void *product, Py_ssize_t at, Py_ssize_t end) { outputs_by_panels(product, how, at, end); }
OUTPUTS(Q4_K) OUTPUTS(Q5_K)
#undef OUTPUTS
