// SPDX-License-Identifier: Apache-2.0
// Integers of four bits times x as integers of 16 bits, for processors that multiply bytes in pairs and no bfloat16: half of the instructions of products of floats.
//
// 32 neighbours of x have one power of two, by the largest of them: those that are not over 2^7 times smaller are exact, others are off by 2^-15 of the largest at most. Their high and low bytes
// are multiplied by themselves, and sums of a step are exact. A row has the same numbers in any company, and so the same bits.

#ifndef NNFRONT_QUANTIZED_VALUES_INTEGERS_H
#define NNFRONT_QUANTIZED_VALUES_INTEGERS_H

#if BYTES_BY_PAIRS

enum {
    ALIKE = 32,             // columns with one power of two
    LEAST_POWER = 30 << 7,  // in bfloat16; what is smaller has this one, so that its inverse is a float
};

// Bring a row of x into the order of steps: vectors of the high bytes of columns of low halves, of those of high halves, of the low bytes likewise, of sums of lanes times -8, and of powers of
// two. What is added at its end is zero.
FAST static void arrange_integers(const uint16_t *from, float *to, Py_ssize_t columns, Py_ssize_t steps) {
    for (Py_ssize_t step = 0; step < steps; step++, to += INTEGER_VECTORS * FLOATS) {
        uint8_t bytes[4][VECTOR];
        int32_t less[FLOATS] = {0};
        float powers[FLOATS];
        for (int part = 0; part < 2 * VECTOR / ALIKE; part++) {
            const Py_ssize_t at = (step * 2 * VECTOR / ALIKE + part) * ALIKE, left = columns - at;
            uint16_t most = LEAST_POWER;
            int32_t numbers[ALIKE];
            for (int i = 0; i < ALIKE && i < left; i++) most = (from[at + i] & 0x7F80) > most ? from[at + i] & 0x7F80 : most;
            const float power = widened(most) * 0x1p-14f, inverse = 1.0f / power;
            for (int i = 0; i < ALIKE; i += FLOATS) {
                const Floats values = left > i ? widened_vector(from + at + i, first_lanes(left - i)) : all(0.0f);
                const Ints some = __builtin_convertvector(nearest(values * all(inverse)), Ints);
                memcpy(numbers + i, &some, sizeof some);
            }
            for (int i = 0; i < ALIKE; i++) {
                const int place = part * ALIKE + i;
                bytes[i % 2][place / 2] = (uint8_t)(numbers[i] >> 8), bytes[2 + i % 2][place / 2] = (uint8_t)numbers[i];
                less[place / IN_WORD] -= 8 * numbers[i];
                powers[place / IN_WORD] = power;
            }
        }
        memcpy(to, bytes, sizeof bytes), memcpy(to + 4 * FLOATS, less, sizeof less), memcpy(to + 5 * FLOATS, powers, sizeof powers);
    }
}

// The sums over groups of a row of x as it is multiplied, and zeros behind them.
FAST static void sum_integers(const float *x, float *to, Py_ssize_t groups, const int shift) {
    const Py_ssize_t lanes = (1 << shift) / IN_WORD;
    for (Py_ssize_t group = 0; group < groups + FLOATS; group++) {
        to[group] = 0.0f;
        for (Py_ssize_t lane = group * lanes; group < groups && lane < (group + 1) * lanes; lane++) {
            const float *step = x + lane / FLOATS * INTEGER_VECTORS * FLOATS + lane % FLOATS;
            int32_t less;
            memcpy(&less, step + 4 * FLOATS, sizeof less);
            to[group] -= (float)(less / 8) * step[5 * FLOATS];
        }
    }
}

// For each lane of a step of an output the scale of its group: bfloat16 that are all there are brought to their lanes by the places of their bytes.
FAST INLINE Floats scales_of_lanes(const Quantized *p, const Constants *c, Py_ssize_t at, Py_ssize_t step, const bool is_whole) {
    const Py_ssize_t group = step * 2 * VECTOR >> p->shift, first = at * p->groups + group;
    if (is_whole && p->kind == BFLOAT16_SCALES) {
        const uint16_t *from = (const uint16_t *)p->scales + first;
        uint64_t some = 0;
        if (2 * VECTOR >> p->shift == 4) memcpy(&some, from, 8);
        else if (2 * VECTOR >> p->shift == 2) memcpy(&some, from, 4);
        else return all(widened(*from));
#if AVX512
        return (Floats)_mm512_shuffle_epi8(_mm512_set1_epi64((int64_t)some), (__m512i)c->bytes);
#else
        return (Floats)_mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)some), (__m256i)c->bytes);
#endif
    }
    float near[FLOATS];
    const Lanes there = first_lanes(p->outputs * p->groups - first);  // what lies there may be another output's
    store(near, group_scales(p, at, group, there));
    return spread(near, c->places);
}

// Add to `sums` what the steps `first` to `end` of an output and the first rows of x contribute.
FAST INLINE void add_integers(const Quantized *p, const Constants *c, const Stored how, Floats *sums, Py_ssize_t at, Py_ssize_t step, const bool is_whole, const int rows) {
    const uint8_t *quantized = p->quantized + at * p->bytes + step * VECTOR;
    const Bits flipped = how == INT4_GROUPS ? c->eights : (Bits){0}, words = (is_whole ? (Bits)floats(quantized) : some_bytes(quantized, p->bytes % VECTOR)) ^ flipped;
    const Bits low = words & 0x0F0F0F0F, high = words >> 4 & 0x0F0F0F0F;
    const Floats scales = scales_of_lanes(p, c, at, step, is_whole);
    __builtin_prefetch(quantized + p->ahead, 0, 2);
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        const Element *x = p->x + row * p->stride + step * INTEGER_VECTORS * FLOATS;
        const Bits of[4] = {(Bits)floats(x), (Bits)floats(x + FLOATS), (Bits)floats(x + 2 * FLOATS), (Bits)floats(x + 3 * FLOATS)};
        const Words none = {0}, highs = plus_pairs(plus_pairs(none, low, of[0]), high, of[1]), lows = plus_pairs(plus_pairs(none, of[2], low), of[3], high);
        const Ints begin = is_taken_from_steps(how) ? (Ints)floats(x + 4 * FLOATS) : (Ints){0}, total = plus_neighbours(plus_neighbours(begin, lows, in_all(1)), highs, in_all(256));
        sums[row] = fused(__builtin_convertvector(total, Floats), scales * floats(x + 5 * FLOATS), sums[row]);
    }
}

FAST INLINE void add_integer_steps(const Quantized *p, const Constants *c, const Stored how, Floats *sums, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, const int rows) {
    const Py_ssize_t whole = p->bytes / VECTOR;
    for (Py_ssize_t step = first; step < (end < whole ? end : whole); step++) add_integers(p, c, how, sums, at, step, true, rows);
    if (end > whole) add_integers(p, c, how, sums, at, whole, false, rows);
}

#else

FAST INLINE void arrange_integers(const uint16_t *from, float *to, Py_ssize_t columns, Py_ssize_t steps) {}
FAST INLINE void sum_integers(const float *x, float *to, Py_ssize_t groups, const int shift) {}
FAST INLINE void add_integer_steps(const Quantized *p, const Constants *c, const Stored how, Floats *sums, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, const int rows) {}

#endif

#endif
