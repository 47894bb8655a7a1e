// SPDX-License-Identifier: Apache-2.0
// Few rows, rounded to 8 bits, times a weight as it lies: dots of vectors, of four outputs at a time, where bytes are multiplied by fours (part of `int8_product.c`).
//
// A vector of bytes of an output is FLOATS sums of neighbours. Those of four outputs are added up together to a quarter of a vector for each 16 bytes, in which each output has a lane.

enum {
    FEW = BYTES_BY_PAIRS ? 4 : 16, FEW_IN_GROUPS = 4,  // rows for which that pays, with a scale for each output and with more
    FEW_IN_BLOCK = REGISTERS / 8,  // rows at once
    QUARTERS = FLOATS / FOUR,
    FETCHED = 64,                 // bytes that come with one fetch
    FEW_AHEAD = 9 << 10,          // bytes of a weight that are fetched before they are needed: what the nearest cache holds beside rows
};

typedef int32_t FourInts OF(16);

// Numbers of four outputs, a vector each, as four of them for each number.
FAST INLINE void by_number(const Bits *of, Four *to) {
    const Bits a = first_pairs(of[0], of[1]), b = last_pairs(of[0], of[1]), c = first_pairs(of[2], of[3]), d = last_pairs(of[2], of[3]);
    const Bits numbers[FOUR] = {first_halves(a, c), last_halves(a, c), first_halves(b, d), last_halves(b, d)};
#pragma GCC unroll 4
    for (int i = 0; i < FOUR; i++) {
        Four some[QUARTERS];
        memcpy(some, &numbers[i], sizeof some);
        for (int quarter = 0; quarter < QUARTERS; quarter++) to[quarter * FOUR + i] = some[quarter];
    }
}

// For FLOATS parts from `first` on the scales of four outputs, and of zero points what their integers are more than the weight's.
FAST INLINE void factors_of_four(const Int8 *p, Py_ssize_t at, Py_ssize_t first, Four *scales, Four *offsets) {
    const struct multiply_int8 *n = p->n;
    const Lanes there = first_lanes(p->parts - first);
    const bool is_wide = n->scale_kind == FLOAT_SCALES;
    Bits of[FOUR], zeros[FOUR] = {{0}};
#pragma GCC unroll 4
    for (int i = 0; i < FOUR; i++) {
        const Py_ssize_t output = output_of(p, at, i), place = output * n->groups + first;
        of[i] = (Bits)(n->stored == INT8 ? all(scale_at(n->scales, (Scales)n->scale_kind, output)) : elements(n->scales, is_wide, place, there));
        if (n->stored == UINT4_GROUPS) zeros[i] = (Bits)__builtin_convertvector(bytes_there((const uint8_t *)n->zeros + place, there), Floats);
    }
    by_number(of, scales);
    if (n->stored == UINT4_GROUPS) by_number(zeros, offsets);
}

// Sums of four outputs, and what their dots of a vector of bytes add to them: `within` parts, or as many as there are.
FAST INLINE Four plus_dots(Four sum, const Ints *dots, const Four *scales, const Four *offsets, const float *x_sums, Py_ssize_t parts, const int within) {
    const Bits *of = (const Bits *)dots;
    const Bits two = first_pairs(of[0], of[1]) + last_pairs(of[0], of[1]), others = first_pairs(of[2], of[3]) + last_pairs(of[2], of[3]);
    const Bits totals = first_halves(two, others) + last_halves(two, others);
    FourInts quarters[QUARTERS];
    memcpy(quarters, &totals, sizeof quarters);
#pragma GCC unroll 4
    for (int i = 0; i < within; i++) {
        if (i >= parts) break;
        FourInts total = quarters[i * QUARTERS / within];
        for (int k = 1; k < QUARTERS / within; k++) total += quarters[i * QUARTERS / within + k];
        const Four less = __builtin_convertvector(total, Four) - offsets[i] * x_sums[i];
        sum = fused_four(less, scales[i], sum);
    }
    return sum;
}

// What `parts` parts from one on add to the sums of four outputs and some rows, FLOATS apart. The last bytes of an output, fewer than a vector, are read in `ends`.
// `halves` of a byte, parts `within` a vector and `rows` are constants wherever this is inlined.
FAST INLINE void dot_parts(const Int8 *p, const uint8_t *const *weight, const uint8_t (*ends)[VECTOR], const Four *scales, const Four *offsets, Py_ssize_t first, Py_ssize_t parts,
                           Py_ssize_t row, float *to, const int halves, const int within, const int rows) {
    enum { LOW = 0x0F0F0F0F };
    const uint32_t flipped = halves == 1 ? BYTES_MORE * 0x01010101u : p->n->stored == INT4_GROUPS ? 0x88888888 : 0;
    const Py_ssize_t bytes = p->bytes, of_part = p->length / halves, padded = p->padded, all_parts = p->parts, of_four = FOUR * bytes + !bytes;
    const uint8_t *ahead = weight[0] + (row ? 0 : (FEW_AHEAD + of_four - 1) / of_four * of_four);  // other outputs, in the order of memory
    const Rounded *x = p->quantized + row * padded + first * p->length;
    const float *x_sums = p->sums + row * all_parts + first;
    Four sums[FEW_IN_BLOCK];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) memcpy(&sums[i], to + i * FLOATS, sizeof *sums);
    for (Py_ssize_t at = first * of_part; parts > 0; parts -= within, x_sums += within, scales += within, offsets += within) {
        const Py_ssize_t until = within > 1 ? at + VECTOR : at + of_part < bytes ? at + of_part : bytes;
        Ints dots[FEW_IN_BLOCK][FOUR];
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < FOUR; j++) dots[i][j] = (Ints){0};
        for (; at < until; at += VECTOR, x += halves * VECTOR)
#pragma GCC unroll 4
            for (int j = 0; j < FOUR; j++) {
                const Bits found = (Bits)floats(at + VECTOR <= bytes ? weight[j] + at : ends[j]) ^ flipped;
                const Bits of[2] = {halves == 1 ? found : found & LOW, found >> 4 & LOW};
                if (j * VECTOR % FETCHED == 0) fetch(ahead + FOUR * at + j * VECTOR);
#pragma GCC unroll 4
                for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
                    for (int half = 0; half < halves; half++)
                        dots[i][j] = plus_fours(dots[i][j], of[half], (Bits)floats(x + i * padded + half * VECTOR));
            }
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) sums[i] = plus_dots(sums[i], dots[i], scales, offsets, x_sums + i * all_parts, parts, within);
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) memcpy(to + i * FLOATS, &sums[i], sizeof *sums);
}

// The same of one row and bytes with a scale for each output: outputs are read one after the other, as they lie in memory, so that it gives all it can.
FAST INLINE void dot_in_turn(const Int8 *p, const uint8_t *const *weight, const uint8_t (*ends)[VECTOR], const Four *scales, const Four *offsets, Py_ssize_t first, Py_ssize_t parts, float *to) {
    Ints dots[FLOATS][FOUR];
    for (int j = 0; j < FOUR; j++)
        for (Py_ssize_t part = 0, at = first * p->length; part < parts; part++) {
            const Py_ssize_t until = at + p->length < p->bytes ? at + p->length : p->bytes;
            Ints dot = {0};
            for (; at < until; at += VECTOR) {
                const Bits of = (Bits)floats(at + VECTOR <= p->bytes ? weight[j] + at : ends[j]) ^ BYTES_MORE * 0x01010101u;
                if (at % FETCHED < VECTOR) fetch(weight[j] + at + FEW_AHEAD);
                dot = plus_fours(dot, of, (Bits)floats(p->quantized + at));
            }
            dots[part][j] = dot;
        }
    Four sum = {0};
    memcpy(&sum, to, sizeof sum);
    for (Py_ssize_t part = 0; part < parts; part++) sum = plus_dots(sum, dots[part], scales + part, offsets + part, p->sums + first + part, 1, 1);
    memcpy(to, &sum, sizeof sum);
}

// Make the sums of one row and of vectors of outputs that are bytes with a scale each: a vector of bytes of an output of each in turn.
FAST static void sum_streams_of_bytes(const Int8 *p, const Py_ssize_t *at, float *sums) {
    const Four offsets = (float)BYTES_MORE - (Four){0};
    for (int lane = 0; lane < FLOATS; lane++) {
        const uint8_t *weight[FOUR];
        Four scales, sum = {0};
        for (int i = 0; i < FOUR; i++) {
            const Py_ssize_t output = output_of(p, at[i % STREAMS], lane);
            weight[i] = (const uint8_t *)p->n->quantized + output * p->bytes;
            scales[i] = scale_at(p->n->scales, (Scales)p->n->scale_kind, output);
        }
        for (Py_ssize_t byte = 0, part = 0; byte < p->bytes; part++) {
            Ints dots[FOUR] = {{0}};
            for (const Py_ssize_t end = p->bytes - byte < CHUNK ? p->bytes : byte + CHUNK; byte < end; byte += VECTOR)
#pragma GCC unroll 4
                for (int i = 0; i < FOUR; i++) {
                    if (byte % FETCHED == 0) fetch(weight[i] + byte + AHEAD_OF_STREAM);
                    dots[i] = plus_fours(dots[i], some_bytes(weight[i] + byte, p->bytes - byte) ^ BYTES_MORE * 0x01010101u, (Bits)floats(p->quantized + byte));
                }
            sum = plus_dots(sum, dots, &scales, &offsets, p->sums + part, 1, 1);
        }
        for (int i = 0; i < STREAMS; i++) sums[i * FLOATS + lane] = sum[i];
    }
}

// Vectors of outputs, by number.
FAST INLINE void few_outputs(const Int8 *p, Py_ssize_t vector, Py_ssize_t last, const int halves, const int within) {
    const struct multiply_int8 *n = p->n;
    const Py_ssize_t over = p->bytes % VECTOR;
    Four scales[FLOATS], offsets[FLOATS];
    float sums[2][FEW * FLOATS];
    uint8_t ends[FOUR][VECTOR] = {{0}};
    for (int i = 0; i < FLOATS; i++) offsets[i] = (float)(halves == 1 ? BYTES_MORE : 8) - (Four){0};
    if (n->stored == INT8) vector = in_streams(p, vector, last, FLOATS, sum_streams_of_bytes);
    for (; vector < last; vector++) {
        memset(sums, 0, sizeof sums);
        for (Py_ssize_t four = 0; four < (1 + is_gated(n)) * FLOATS; four += FOUR) {  // gates, then what they are multiplied with
            const Py_ssize_t half = four / FLOATS, lane = four % FLOATS, at = half * n->outputs + vector * FLOATS + lane;
            if (vector * FLOATS + lane >= n->outputs) continue;
            const uint8_t *weight[FOUR];
            for (int i = 0; i < FOUR; i++) {
                weight[i] = (const uint8_t *)n->quantized + output_of(p, at, i) * p->bytes;
                memcpy(ends[i], weight[i] + p->bytes - over, (size_t)over);
            }
            for (Py_ssize_t first = 0; first < p->parts; first += FLOATS) {
                const Py_ssize_t parts = p->parts - first < FLOATS ? p->parts - first : FLOATS;
                if (!first || n->stored != INT8) factors_of_four(p, at, first, scales, offsets);
                if (n->rows == 1 && n->stored == INT8) {
                    dot_in_turn(p, weight, ends, scales, offsets, first, parts, sums[half] + lane);
                    continue;
                }
                for (Py_ssize_t row = 0, rows; row < n->rows; row += rows) {
                    rows = n->rows - row >= FEW_IN_BLOCK ? (Py_ssize_t)FEW_IN_BLOCK : n->rows - row >= 2 ? 2 : 1;
                    float *to = sums[half] + row * FLOATS + lane;
#define ROWS(count) case count: dot_parts(p, weight, ends, scales, offsets, first, parts, row, to, halves, within, count); break;
                    switch (rows) {
                        ROWS(1) ROWS(2)
#if REGISTERS == 32
                        ROWS(4)
#endif
                    }
#undef ROWS
                }
            }
        }
        finish_rows(p, vector * FLOATS, 0, n->rows, sums[0], sums[1], FLOATS);
    }
}

#define OUTPUTS(halves, within) \
    FAST static void few_outputs_##halves##_##within(const void *given, Py_ssize_t vector, Py_ssize_t last) { few_outputs(given, vector, last, halves, within); }
OUTPUTS(1, 1) OUTPUTS(1, 2) OUTPUTS(2, 1) OUTPUTS(2, 2) OUTPUTS(2, 4)
#undef OUTPUTS

// For parts of so many columns.
static Share few_outputs_of(const Stored how, Py_ssize_t length) {
    const Py_ssize_t within = VECTOR * (1 + (how >= INT4_GROUPS)) / length;
    const bool are_four = QUARTERS >= 4 && within == 4, are_two = QUARTERS >= 2 && within == 2;  // a shorter vector has no such parts
    if (how >= INT4_GROUPS) return are_four ? few_outputs_2_4 : are_two ? few_outputs_2_2 : few_outputs_2_1;
    return are_two ? few_outputs_1_2 : few_outputs_1_1;
}
