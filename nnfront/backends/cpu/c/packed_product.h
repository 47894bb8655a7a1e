// SPDX-License-Identifier: Apache-2.0
// Rows of x, rounded to 8 bits or as they are in bfloat16, times a packed weight as it lies (part of `int8_product.c`).
//
// Outputs lie in lanes, and elements of x are the same in all lanes: so the sums of a part are scaled once for all outputs of a vector, and nothing is summed across lanes. Of rows that are rounded,
// four neighbours meet four bytes, or halves of them, of each output (`multiply_block`). For rows as they are these become numbers that bfloat16 or, where it is not multiplied in pairs, float holds
// exactly; the rows are brought into the order of numbers before. Those that are multiplied at a time lie beside one another. Few rows meet several panels at once where that is faster (`words.h`).
// Sums of a row have one order, whatever rows are beside it.

enum {
#if AVX512_BF16
    NEIGHBOURS = 2,         // columns whose numbers are in one lane
    MOST_IN_BLOCK = 12,     // rows as they are that are multiplied at a time: their sums, and those of a part, are in registers
    MOST_ALONE = 16,        // those without parts where there are no more
#else
    NEIGHBOURS = 1,
    MOST_IN_BLOCK = 4,
    MOST_ALONE = 4,
#endif
    MOST_BY_FOURS = 4,      // rows for which four bytes become numbers by instructions that sum four products
    NEAR_PLACED = 1 << 19,  // bytes of x that the next cache holds beside what passes through it
    MOST_OF_ALL = (int)MOST_ALONE > (int)IN_BLOCK_ALONE ? (int)MOST_ALONE : (int)IN_BLOCK_ALONE,  // rows of a block
    MOST_FOUND = 16,        // of a zero point that is taken from a number before it is looked up; what is more is taken from the sum
};

#if AVX512_BF16
typedef Words Numbers;
#else
typedef Floats Numbers;
#endif

INLINE int columns_in_word(const Stored how) { return how >= INT4_GROUPS ? 8 : FOUR; }

// Vectors that a word becomes; number `k` of a lane is that of column k, and behind it of that as many columns further.
INLINE int numbers_of_word(const Stored how) { return columns_in_word(how) / NEIGHBOURS; }

// The most rows of a block, or of one whose weight has no groups where there are no more rows.
INLINE int most_in_block(const bool is_rounded) { return is_rounded ? IN_BLOCK : MOST_IN_BLOCK; }

INLINE int most_alone(const bool is_rounded) { return is_rounded ? (int)IN_BLOCK_ALONE : (int)MOST_ALONE; }

// How many panels so many rows meet in turn: products of one panel would wait for each other, and what is read of x meets all of them. As many as registers have room for sums. Bytes that are rounded have
// more, as those over parts lie in memory meanwhile, beside products alone; four bits that are rounded have fewer, as two of what is read are made of each word.
INLINE int streams_for(const Stored how, const bool is_rounded, Py_ssize_t rows) {
    const Py_ssize_t sums = rows * IN_PANEL, most = !is_rounded ? (int)SUMS_AT_ONCE : how >= INT4_GROUPS ? SUMS_AT_ONCE / 4 * 3 : SUMS_IN_STREAMS;
    return STREAMS == 1 || rows > most_in_block(is_rounded) ? 1 : sums * STREAMS <= SUMS_AT_ONCE ? STREAMS : sums * (STREAMS / 2) <= most ? STREAMS / 2 : 1;
}

#if AVX512_BF16
// Bring four rows of a block of `rows` into the order [word, number, row, neighbour], for all eights of columns: how many columns these are is returned.
FAST INLINE Py_ssize_t place_four_rows(const Int8 *p, const uint16_t *x, Element *to, Py_ssize_t rows) {
    const Py_ssize_t columns = p->n->columns, placed = columns / 8 * 8;
    const __m128i by_fours = _mm_set_epi8(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0), by_twos = _mm_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0);
    const __m128i order = columns_in_word((Stored)p->n->stored) == 8 ? by_fours : by_twos;
    for (Py_ssize_t column = 0; column < placed; column += 8, to += 8 * rows) {
        __m128i of[4], halves[4];
        for (int row = 0; row < 4; row++) of[row] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(x + row * columns + column)), order);
        for (int i = 0; i < 2; i++) halves[i] = _mm_unpacklo_epi32(of[2 * i], of[2 * i + 1]), halves[2 + i] = _mm_unpackhi_epi32(of[2 * i], of[2 * i + 1]);
        for (int i = 0; i < 2; i++) of[2 * i] = _mm_unpacklo_epi64(halves[2 * i], halves[2 * i + 1]), of[2 * i + 1] = _mm_unpackhi_epi64(halves[2 * i], halves[2 * i + 1]);
        for (int k = 0; k < 4; k++) _mm_storeu_si128((__m128i *)(to + 2 * k * rows), of[k]);
    }
    return placed;
}
#endif

// The same of blocks.
FAST static void place_blocks(const void *given, Py_ssize_t block, Py_ssize_t end) {
    const Int8 *p = given;
    const Stored how = (Stored)p->n->stored;
    const Py_ssize_t columns = p->n->columns;
    const int numbers = numbers_of_word(how);
    for (; block < end; block++) {
        const Py_ssize_t first = first_of_block(p, block), rows = first_of_block(p, block + 1) - first;
        Py_ssize_t placed = 0;
        for (Py_ssize_t row = 0; row < rows; row++) {
            const uint16_t *x = (const uint16_t *)p->n->x + (first + row) * columns;
            Element *to = (Element *)p->quantized + first * columns + row * NEIGHBOURS;
#if AVX512_BF16
            if (row % 4 == 0) placed = rows - row < 4 ? 0 : place_four_rows(p, x, to, rows);  // of this row and the next three
#endif
            to += placed * rows;
            for (Py_ssize_t column = placed; column < columns; column += columns_in_word(how))
                for (int k = 0; k < numbers; k++, to += rows * NEIGHBOURS)
                    for (int i = 0; i < NEIGHBOURS; i++) {
#if AVX512_BF16
                        to[i] = x[column + k + i * numbers];
#else
                        to[i] = widened(x[column + k + i * numbers]);
#endif
                    }
        }
    }
}

#if AVX512_BF16
// Numbers of five bits with a sign.
static const uint16_t differences[LANES] = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0xC180, 0xC170, 0xC160, 0xC150, 0xC140, 0xC130, 0xC120, 0xC110, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
};
#endif

// What four bits stand for, or those less a zero point; of bytes where the upper halves of two vectors of floats lie, in turn.
FAST INLINE Words table_of(const Stored how) {
#if AVX512_BF16
    if (how >= INT4_GROUPS) return (Words)_mm512_loadu_si512(how == UINT4_GROUPS ? differences : integers);
    Words upper;
    for (int i = 0; i < LANES; i++) upper[i] = (uint16_t)(i / 2 * 2 + 1 + i % 2 * LANES);
    return upper;
#else
    return (Words){0};
#endif
}

// Vector `k` of what a word becomes; `zeros` is what is taken from numbers with zero points, in each half of a lane where two are in one.
FAST INLINE Numbers numbers_of(const Stored how, Words table, Bits word, Bits zeros, const int k, const bool are_few) {
#if AVX512_BF16
    if (how >= INT4_GROUPS) {
        Words places = (Words)word >> 4 * k;
        if (how == UINT4_GROUPS) places = (places & 15) - (Words)zeros;
        return (Words)_mm512_permutexvar_epi16((__m512i)places, (__m512i)table);
    }
    if (are_few) {
        const __m512i first = _mm512_set1_epi32(1 << 8 * k), none = _mm512_setzero_si512();
        const __m512 low = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(none, first, (__m512i)word));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(none, _mm512_slli_epi32(first, 16), (__m512i)word));
        return (Words)_mm512_permutex2var_epi16((__m512i)low, (__m512i)table, (__m512i)high);
    }
    const Floats low = __builtin_convertvector((Ints)(word << (24 - 8 * k)) >> 24, Floats), high = __builtin_convertvector((Ints)(word << (8 - 8 * k)) >> 24, Floats);
    return (Words)_mm512_ternarylogic_epi32((__m512i)((Bits)low >> 16), (__m512i)high, _mm512_set1_epi32((int)0xFFFF0000), 0xF8);  // the upper halves of both
#else
    if (how < INT4_GROUPS) return __builtin_convertvector((Ints)(word << (24 - 8 * k)) >> 24, Floats);
    if (how == INT4_GROUPS) return __builtin_convertvector((Ints)(word << (28 - 4 * k)) >> 28, Floats);
    return __builtin_convertvector((Ints)(word >> 4 * k & 15) - (Ints)zeros, Floats);
#endif
}

// What numbers times the elements of a row add to each sum.
FAST INLINE Floats plus_numbers(Floats sum, Numbers numbers, const Element *x) {
#if AVX512_BF16
    int32_t both;
    memcpy(&both, x, sizeof both);
    return _mm512_dpbf16_ps(sum, (__m512bh)numbers, (__m512bh)_mm512_set1_epi32(both));
#else
    return fused(numbers, all(*x), sum);
#endif
}

// The sum of `count` pairs of a row, [pair, rows].
FAST INLINE float sum_of_pairs(const Element *x, Py_ssize_t count, const int rows) {
    float sum = 0.0f;
    for (Py_ssize_t i = 0; i < count; i++) sum += widened(((const uint16_t *)x)[2 * i * rows]) + widened(((const uint16_t *)x)[2 * i * rows + 1]);
    return sum;
}

// Make the sums of a block of `rows`, of which `x` is the first element from column `first` on, and of `vectors` vectors of outputs of some panels, the first of which is number `v` of its panel, [panel, row, output]: what the columns
// `first` to `end` give is added to them, or with the first columns they begin. The constants are so wherever this is inlined.
FAST INLINE void sum_numbers(const Int8 *p, const Stored how, Words table, const PackedPanel *panels, int v, Py_ssize_t first, Py_ssize_t end, const Element *x, float *to, const int rows, const int vectors) {
    enum { MOST = (int)MOST_ALONE * IN_PANEL > (int)SUMS_AT_ONCE ? (int)MOST_ALONE * IN_PANEL : (int)SUMS_AT_ONCE };
    const int all_of = rows * vectors, numbers = numbers_of_word(how);
    Floats sums[MOST];
#pragma GCC unroll 16
    for (int i = 0; i < all_of; i++) sums[i] = first ? floats(to + v * FLOATS + place_of_vector(i, rows)) : all(0.0f);
    Py_ssize_t at = v * VECTOR;
    for (Py_ssize_t begin = first, part = 0; begin < end; begin += p->length, part++) {
        const Py_ssize_t words = (end - begin < p->length ? end - begin : p->length) / columns_in_word(how);
        Floats parts[MOST];
        Bits zeros[STREAMS * IN_PANEL];
#pragma GCC unroll 16
        for (int i = 0; i < all_of; i++) parts[i] = all(0.0f);
#pragma GCC unroll 4
        for (int j = 0; j < vectors && how == UINT4_GROUPS; j++) {
            zeros[j] = bytes_there(panels[j / IN_PANEL].zeros + part * OF_PANEL + (v + j % IN_PANEL) * FLOATS, first_lanes(FLOATS));
#if AVX512_BF16
            const Bits more = (Bits)_mm512_subs_epu16((__m512i)zeros[j], _mm512_set1_epi32(MOST_FOUND));
            zeros[j] = (zeros[j] - more) * 0x10001;
            const Lanes have_more = _mm512_test_epi32_mask((__m512i)more, (__m512i)more);
            for (int row = 0; row < rows && have_more; row++)
                parts[j * rows + row] = only(have_more, __builtin_convertvector((Ints)more, Floats) * -sum_of_pairs(x + row * NEIGHBOURS, words * numbers, rows));
#endif
        }
#pragma GCC unroll 1
        for (const Py_ssize_t behind = at + words * OF_PANEL * FOUR; at < behind; at += OF_PANEL * FOUR) {
            Bits found[STREAMS * IN_PANEL];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) {
                const uint8_t *from = panels[j / IN_PANEL].words + at + j % IN_PANEL * VECTOR;
                found[j] = (Bits)loaded((const float *)from);
                if (j % IN_PANEL == 0) fetch(from + ahead_of(rows, vectors));
            }
#pragma GCC unroll 8
            for (int k = 0; k < numbers; k++, x += rows * NEIGHBOURS)
#pragma GCC unroll 4
                for (int j = 0; j < vectors; j++) {
                    const Numbers some = numbers_of(how, table, found[j], zeros[j], k, rows <= MOST_BY_FOURS);
#pragma GCC unroll 16
                    for (int row = 0; row < rows; row++) parts[j * rows + row] = plus_numbers(parts[j * rows + row], some, x + row * NEIGHBOURS);
                }
        }
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            const Floats scales = panel_scales(p, panels + j / IN_PANEL, part, v + j % IN_PANEL);
#pragma GCC unroll 16
            for (int i = j * rows; i < (j + 1) * rows; i++) sums[i] = fused(parts[i], scales, sums[i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < all_of; i++) store(to + v * FLOATS + place_of_vector(i, rows), sums[i]);
}

// Make the sums of a block of `rows` and of panels of outputs, which begin at `at`: [panel, row, output]. The constants are so wherever this is inlined.
FAST INLINE void sum_of_rows(const Int8 *p, const Stored how, const bool is_rounded, const bool is_short, const Py_ssize_t *at, Py_ssize_t row, float *sums, const int rows, const int streams) {
    MadePanel made;
    const Py_ssize_t columns = p->n->columns;
    const Words table = table_of(how);
    const bool is_whole = streams > 1 || lies_in_panel(p, *at);
    const int together = streams > 1 || rows == 1 || (is_rounded && rows * IN_PANEL <= SUMS_AT_ONCE) ? IN_PANEL * streams : 1;
    for (Py_ssize_t first = 0, end; first < columns; first = end) {
        end = is_whole ? columns : least(first + CHUNK, columns);
        PackedPanel panels[STREAMS];
        for (int i = 0; i < streams; i++) panels[i] = is_whole ? panel_of(p, at[i], first) : made_panel(p, *at, first, end, &made);
        for (int v = 0; v < IN_PANEL * streams; v += together)
            if (is_rounded) multiply_block(p, panels, v, VECTOR, true, how >= INT4_GROUPS ? 2 : 1, NULL, NULL, first, end, row, sums, how == UINT4_GROUPS, rows < most_alone(true) ? rows : most_alone(true), together, is_short);
            else sum_numbers(p, how, table, panels, v, first, end, (const Element *)p->quantized + row * columns + first * rows, sums, rows < most_alone(false) ? rows : most_alone(false), together);
    }
}

// The same of the rows of a block, by their number; of several panels for all rows that there are.
FAST INLINE void sum_rows(const Int8 *p, const Stored how, const bool is_rounded, const bool is_short, const Py_ssize_t *at, Py_ssize_t row, Py_ssize_t rows, float *sums, const bool are_streams) {
    const int most = how == INT8 ? most_alone(is_rounded) : most_in_block(is_rounded);
#define ROWS(count) \
    case count: { \
        const int streams = are_streams ? streams_for(how, is_rounded, count) : 1; \
        if (count <= most && are_streams == (streams > 1)) sum_of_rows(p, how, is_rounded, is_short, at, row, sums, count, streams); \
        break; \
    }
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) ROWS(13) ROWS(14) ROWS(15) ROWS(16) }
#undef ROWS
}

// Panels of outputs, by number.
FAST INLINE void packed_outputs(const Int8 *p, const Stored how, const bool is_rounded, const bool is_short, Py_ssize_t panel, Py_ssize_t last, StreamSums *sums_of) {
    float sums[2][MOST_OF_ALL * OF_PANEL];
    panel = in_streams(p, streams_for(how, is_rounded, p->n->rows), panel, least(last, p->n->outputs / OF_PANEL), OF_PANEL, sums_of);
    const Py_ssize_t row_bytes = is_rounded ? p->next : p->n->columns * (Py_ssize_t)sizeof(Element), near = NEAR_PLACED / (most_in_block(is_rounded) * row_bytes) + 1;
    for (Py_ssize_t from = 0; from < p->blocks; from += near)
        for (Py_ssize_t i = panel; i < last; i++)
            for (Py_ssize_t block = from; block < least(from + near, p->blocks); block++) {
                const Py_ssize_t at[2] = {i * OF_PANEL, p->n->outputs + i * OF_PANEL}, row = first_of_block(p, block), behind = first_of_block(p, block + 1);
                for (int half = 0; half <= is_gated(p->n); half++) sum_rows(p, how, is_rounded, is_short, at + half, row, behind - row, sums[half], false);
                for (int lane = 0; lane < OF_PANEL && *at + lane < p->n->outputs; lane += FLOATS) finish_rows(p, *at + lane, row, behind, sums[0] + lane, sums[1] + lane, OF_PANEL);
            }
}

#define OUTPUTS(name, how, is_rounded, is_short) \
    FAST static void name##_in_streams(const Int8 *p, const Py_ssize_t *at, float *sums) { sum_rows(p, how, is_rounded, is_short, at, 0, p->n->rows, sums, true); } \
    FAST static void name(const void *given, Py_ssize_t panel, Py_ssize_t last) { packed_outputs(given, how, is_rounded, is_short, panel, last, name##_in_streams); }
OUTPUTS(int8_as_it_is, INT8, false, false)
OUTPUTS(int8_groups_as_it_is, INT8_GROUPS, false, false)
OUTPUTS(int4_groups_as_it_is, INT4_GROUPS, false, false)
OUTPUTS(uint4_groups_as_it_is, UINT4_GROUPS, false, false)
OUTPUTS(int8_rounded, INT8, true, false)
OUTPUTS(int4_groups_rounded, INT4_GROUPS, true, false)
OUTPUTS(uint4_groups_rounded, UINT4_GROUPS, true, false)
#if BYTES_BY_PAIRS
OUTPUTS(int4_short_groups_rounded, INT4_GROUPS, true, true)
#else
#define int4_short_groups_rounded int4_groups_rounded
#endif
#undef OUTPUTS

static Share packed_outputs_of(const Int8 *p) {
    switch ((Stored)p->n->stored) {
        case INT8: return p->n->is_rounded ? int8_rounded : int8_as_it_is;
        case INT8_GROUPS: return p->n->is_rounded ? int8_rounded : int8_groups_as_it_is;
        case INT4_GROUPS: return !p->n->is_rounded ? int4_groups_as_it_is : begins_in_words(p) ? int4_short_groups_rounded : int4_groups_rounded;
        default: return p->n->is_rounded ? uint4_groups_rounded : uint4_groups_as_it_is;
    }
}
