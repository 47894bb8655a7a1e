// SPDX-License-Identifier: Apache-2.0
// Products of rows with a weight that is stored in 8 or 4 bits, of any number of rows.
//
// As with bfloat16 (products.c), reading the weight is what takes time of a few rows. Quantised values are decoded in registers, a step at a time, as the
// instruction set does it best (`quantized_values_bf16.h`, `quantized_values_float.h`), and multiplied with all rows of x; sums are scaled, not quantised values.
// Of more rows the steps of some outputs are decoded into the nearest cache once, and blocks of rows and outputs multiplied in registers. The sums of a row and an
// output have one order, whatever rows are beside it. Blocks with minima are multiplied in panels where bfloat16 is in pairs (`block_panels.h`). Where the processor has tiles, these multiply several rows (`quantized_tiles.c`).

#if AVX512_BF16
#include "quantized_values_bf16.h"
#else
#include "quantized_values_float.h"
#endif
#include "dequantize.c"
#include "product.h"

INLINE int bytes_in_step(const Stored how) { return in_blocks(how) ? block_bytes(how) : step_bytes(how); }

INLINE int elements_in_step(const Stored how) { return in_blocks(how) ? (int)BLOCK_ELEMENTS : step_elements(how); }

// Of the vectors that a step becomes, how many are multiplied with sums of x, and of the others how many have the same scales, and how often there are so many.
INLINE int factors_in_step(const Stored how) { return in_blocks(how) ? FACTORS / FLOATS : 0; }

INLINE int alike_in_step(const Stored how) { return in_blocks(how) ? (int)BESIDE : parts_of(how); }

INLINE int parts_in_step(const Stored how) {
    return (in_blocks(how) ? (int)BLOCK : step_elements(how)) * (int)sizeof(Element) / VECTOR / alike_in_step(how);
}

INLINE int vectors_in_step(const Stored how) { return factors_in_step(how) + parts_in_step(how) * (alike_in_step(how) + is_grouped(how)); }

// Whether blocks of several outputs are unpacked together (`block_panels.h`).
#if AVX512_BF16
INLINE bool in_panels(const Stored how) { return in_blocks(how) && has_minima(how); }
#else
INLINE bool in_panels(const Stored how) { return false; }
#endif

// Whether the only row meets several places of the weight in turn.
INLINE bool takes_streams(const Quantized *p, const Stored how) { return STREAMS > 1 && !in_blocks(how) && outputs_in_turn(how, 1) == STREAMS && p->usual == 1 && p->rows == 1 && !has_tiles(); }

enum {
    ALIGNED = 64,
    NEAR_DECODED = 1 << 17,  // bytes of what is decoded that the next cache holds, where products are added to sums at once
};

// Add to sums, [output, row], of `each` outputs from `at` on.
FAST INLINE void add_any(const Quantized *p, const Constants *c, const Stored how, Floats *sums, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, const int rows, const int each) {
    if (in_blocks(how)) add_blocks(p, how, sums, at, first, end, rows);
    else add_steps(p, c, how, sums, at, first, end, rows, each);
}

// The sums of an output and of the first rows, `next` apart, before its steps are added.
FAST INLINE void begin_sums(const Quantized *p, const Stored how, Floats *sums, const int next, Py_ssize_t at, Py_ssize_t rows) {
    const Floats first = all(hides_nan(p, how, at) ? NAN : 0.0f);
    for (Py_ssize_t row = 0; row < rows; row++) sums[row * next] = first;
    if (has_offset(how) && !in_blocks(how) && !is_taken_from_steps(how)) add_group_sums(p, how, sums, next, at, offset_of(p, how), rows);
}

typedef float Totals[ROWS_TOGETHER_MOST][OUTPUTS_TOGETHER + FLOATS];

// Add to the sums `of` rows and outputs what the steps `first` to `end` of outputs `i` to `i + each`, counted from `at`, contribute; or of one row in places what output `i` of each place does, [place][i].
FAST INLINE void add_to_outputs(const Quantized *p, const Constants *c, const Stored how, Floats (*of)[OUTPUTS_TOGETHER], Py_ssize_t at, int i, Py_ssize_t first, Py_ssize_t end,
                                const int rows, const int each, const bool in_places) {
    Floats sums[ROWS_AT_ONCE];
#pragma GCC unroll 4
    for (int j = 0; j < each; j++)
        if (!first) begin_sums(p, how, sums + j * rows, 1, at + i + j * p->apart, rows);
        else
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) sums[j * rows + row] = in_places ? of[j][i] : of[row][i + j];
    add_any(p, c, how, sums, at + i, first, end, rows, each);
#pragma GCC unroll 8
    for (int j = 0; j < each * rows; j++) *(in_places ? &of[j][i] : &of[j % rows][i + j / rows]) = sums[j];
}

// The totals of `count` outputs from `at` on and of a few rows, decoded in registers, or of one row and of as many outputs in each place, [place]; `how`, `rows` and `in_places` are constants wherever this is inlined.
FAST INLINE void few_totals(const Quantized *p, const Constants *c, const Stored how, Py_ssize_t at, int count, Totals totals, const int rows, const bool in_places) {
    const Py_ssize_t steps = (p->bytes + bytes_in_step(how) - 1) / bytes_in_step(how);
    const int each = in_blocks(how) ? 1 : outputs_in_turn(how, rows), next = in_places ? 1 : each, made = in_places ? each : rows;
    Floats of[ROWS_AT_ONCE][OUTPUTS_TOGETHER];
    for (int row = 0; row < made; row++)
        for (int i = count; i < OUTPUTS_TOGETHER; i++) of[row][i] = all(0.0f);
    for (Py_ssize_t first = 0; first < steps; first += p->turn) {
        const Py_ssize_t end = first + p->turn < steps ? first + p->turn : steps;
        int i = 0;
        for (; i + next <= count; i += next) add_to_outputs(p, c, how, of, at, i, first, end, rows, each, in_places);
        for (; i < count; i++) add_to_outputs(p, c, how, of, at, i, first, end, rows, 1, false);
    }
    for (int row = 0; row < made; row++) {
        float of_row[16];
        store_totals(of_row, of[row], OUTPUTS_TOGETHER);
        memcpy(totals[row], of_row, sizeof(float) * OUTPUTS_TOGETHER);
    }
}

FAST INLINE Floats multiplied(Floats sum, Floats decoded, Floats x) {
#if AVX512_BF16
    return dot(sum, (Words)decoded, (Words)x);
#else
    return fused(decoded, x, sum);
#endif
}

// A vector that is loaded once: compilers would load it again for each of its uses.
FAST INLINE Floats held(const void *from) {
    Floats found = floats(from);
#if AVX512
    __asm__("" : "+v"(found));
#endif
    return found;
}

// How many decoded outputs are multiplied at a time with BLOCK_ROWS rows: twice as many where there are no sums of steps besides.
INLINE int block_outputs(const Stored how) { return adds_at_once(how) ? PANEL_OUTPUTS : BLOCK_OUTPUTS; }

// Add to sums, [row, output], what steps and rows of x contribute, in the order of `add_any`: decoded [step, output, vector], and that meanwhile for the first rows.
FAST INLINE void add_decoded(const Quantized *p, const Constants *c, const Stored how, Floats *decoded, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, const Element *x,
                             Floats *sums, const int rows, const bool is_first) {
    enum { MOST = BLOCK_ROWS * PANEL_OUTPUTS };
    const int alike = alike_in_step(how), each = block_outputs(how), next = vectors_in_step(how);
    for (Py_ssize_t step = first; step < end; step++, x += elements_in_step(how), decoded += each * next) {
#pragma GCC unroll 6
        for (int j = 0; j < each && is_first; j++) add_any(p, c, how, decoded + j * next, least(at + j, p->outputs - 1), step, step + 1, 0, 1);
        const Floats *from = decoded;
        const Element *with = x;
#pragma GCC unroll 4
        for (int i = 0; i < factors_in_step(how); i++, from++)
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
                for (int j = 0; j < each; j++)
                    sums[row * each + j] = fused(from[j * next], floats((const float *)(x + row * p->stride + BLOCK) + i * FLOATS), sums[row * each + j]);
        for (int part = 0; part < parts_in_step(how); part++) {
            Floats parts[MOST];
#pragma GCC unroll 24
            for (int i = 0; i < rows * each; i++) parts[i] = adds_at_once(how) ? sums[i] : all(0.0f);
#pragma GCC unroll 8
            for (int k = 0; k < alike; k++, from++, with += VECTOR / sizeof(Element)) {
                Floats some[PANEL_OUTPUTS];
#pragma GCC unroll 6
                for (int j = 0; j < each; j++) some[j] = held(from + j * next);
#pragma GCC unroll 4
                for (int row = 0; row < rows; row++) {
                    const Floats of_row = held(with + row * p->stride);
#pragma GCC unroll 6
                    for (int j = 0; j < each; j++) parts[row * each + j] = multiplied(parts[row * each + j], some[j], of_row);
                }
            }
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++)
#pragma GCC unroll 6
                for (int j = 0; j < each; j++) {
                    Floats *sum = sums + row * each + j, part = parts[row * each + j];
                    *sum = adds_at_once(how) ? part : is_grouped(how) ? fused(part, from[j * next], *sum) : *sum + part;
                }
            from += is_grouped(how);
        }
    }
}

// The same of rows whose sums are kept between the turns, and made totals after the last one.
FAST INLINE void multiply_decoded(const Quantized *p, const Constants *c, const Stored how, Floats *decoded, Py_ssize_t at, Py_ssize_t first, Py_ssize_t end, Py_ssize_t steps,
                                  Floats *kept, float (*totals)[OUTPUTS_TOGETHER + FLOATS], const int rows, const bool is_first) {
    const int each = block_outputs(how);
    const Element *x = p->x + first * elements_in_step(how);
    Floats sums[BLOCK_ROWS * PANEL_OUTPUTS];
    float of[BLOCK_ROWS * PANEL_OUTPUTS + 16];
    if (!first)
#pragma GCC unroll 6
        for (int j = 0; j < each; j++) begin_sums(p, how, sums + j, each, least(at + j, p->outputs - 1), rows);
    else
#pragma GCC unroll 24
        for (int i = 0; i < rows * each; i++) sums[i] = kept[i];
    add_decoded(p, c, how, decoded, at, first, end, x, sums, rows, is_first);
    if (end < steps) {
#pragma GCC unroll 24
        for (int i = 0; i < rows * each; i++) kept[i] = sums[i];
        return;
    }
    store_totals(of, sums, rows * each);
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) memcpy(totals[i], of + i * each, (size_t)each * sizeof *of);
}

// The totals of a panel of outputs from `at` on and of many rows, decoded once for all of them, as much at a time as is near.
FAST INLINE void many_totals(const Quantized *p, const Constants *c, const Stored how, Py_ssize_t at, Totals totals, int slot) {
    const Py_ssize_t steps = (p->bytes + bytes_in_step(how) - 1) / bytes_in_step(how), blocks = (p->usual + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int each = block_outputs(how);
    Floats decoded[NEAR_DECODED / VECTOR], kept[PANEL_OUTPUTS * ROWS_TOGETHER_MOST];
    const Py_ssize_t next = p->turn * vectors_in_step(how);
    for (Py_ssize_t first = 0; first < steps; first += p->turn) {
        const Py_ssize_t end = first + p->turn < steps ? first + p->turn : steps;
        for (Py_ssize_t block = 0; block < blocks; block++) {
            const Py_ssize_t from = p->usual * block / blocks;
            Quantized some = *p;
            some.x += from * p->stride, some.sums += from * p->next_sums;
            for (int j = 0; j < PANEL_OUTPUTS; j += each) {
                Floats *of = kept + j * ROWS_TOGETHER_MOST + from * each;
                float(*to)[OUTPUTS_TOGETHER + FLOATS] = (float(*)[OUTPUTS_TOGETHER + FLOATS])(totals[from] + slot + j);
#define ROWS(rows) \
    case rows: \
        if (block) multiply_decoded(&some, c, how, decoded + j * next, at + j, first, end, steps, of, to, rows, false); \
        else multiply_decoded(&some, c, how, decoded + j * next, at + j, first, end, steps, of, to, rows, true); \
        break;
                switch (p->usual * (block + 1) / blocks - from) {
                    ROWS(1) ROWS(2)
#if REGISTERS == 32
                    ROWS(3) ROWS(4)
#endif
                }
#undef ROWS
            }
        }
    }
}

// Write `count` outputs from `at`.
FAST INLINE void finish(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t count, Totals totals) {
    for (Py_ssize_t row = 0; row < p->rows; row++)
        for (int i = 0; i < count; i += FLOATS) {
            const Lanes there = first_lanes(count - i);
            const Py_ssize_t to = p->places[row] * p->outputs + at + i;
            const Floats scales = is_grouped(how) ? all(1.0f) : scales_there(p->scales, p->kind, at + i, there);
            Floats y = fused(floats(totals[row] + i), scales, p->bias ? widened_vector(p->bias + at + i, there) : all(0.0f));
            if (p->added) y += widened_vector(p->added + to, there);
            store_elements(p->y, p->is_wide, to, there, y);
        }
}

// The outputs `at` to `end` of one row, as far as they are in blocks of as many outputs in each of STREAMS places, which take turns (`words.h`). Returns where those begin that are not.
FAST INLINE Py_ssize_t row_in_streams(const Quantized *p, const Constants *c, const Stored how, Py_ssize_t at, Py_ssize_t end) {
    const Py_ssize_t apart = (end - at) / (STREAMS * OUTPUTS_TOGETHER) * OUTPUTS_TOGETHER, behind = at + apart;
    Quantized some = *p;
    some.apart = apart;
    Totals totals;
    for (; at < behind; at += OUTPUTS_TOGETHER) {
        few_totals(&some, c, how, at, OUTPUTS_TOGETHER, totals, 1, true);
        for (int place = 0; place < STREAMS; place++) finish(p, how, at + place * apart, OUTPUTS_TOGETHER, totals + place);
    }
    return at + apart * (STREAMS - 1);
}

FAST INLINE void quantized_outputs(const Quantized *p, const Stored how, Py_ssize_t at, Py_ssize_t end) {
    const Constants c = constants(p, how);
    Totals totals;
    if (takes_streams(p, how)) at = row_in_streams(p, &c, how, at, end);
    for (; at < end; at += OUTPUTS_TOGETHER) {
        const int count = end - at < OUTPUTS_TOGETHER ? (int)(end - at) : OUTPUTS_TOGETHER;
        const bool are_few = in_integers(how) || p->usual <= ROWS_AT_ONCE;
        for (Py_ssize_t row = 0; are_few && row < p->usual; row += ROWS_AT_ONCE) {
            Quantized some = *p;
            some.x += row * p->stride, some.sums += row * p->next_sums;
#define ROWS(rows) case rows: few_totals(&some, &c, how, at, count, totals + row, rows, false); break;
            switch (p->usual - row < ROWS_AT_ONCE ? p->usual - row : ROWS_AT_ONCE) {
                ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if MANY_REGISTERS
                ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#endif
            }
#undef ROWS
        }
        for (int i = 0; !are_few && i < count; i += PANEL_OUTPUTS) many_totals(p, &c, how, at + i, totals, i);
        for (Py_ssize_t row = p->usual; row < p->rows; row++)
            for (int i = 0; i < count; i++) {
                const uint16_t *x = p->plain + p->places[row] * p->columns;
                totals[row][i] = in_blocks(how) ? sum_blocks(p, how, at + i, x) : sum_one_by_one(p, how, at + i, x);
            }
        finish(p, how, at, count, totals);
    }
}

#define OUTPUTS(how) \
    FAST static void quantized_outputs_##how(const void *product, Py_ssize_t at, Py_ssize_t end) { quantized_outputs(product, how, at, end); }
OUTPUTS(INT8) OUTPUTS(INT8_GROUPS) OUTPUTS(FLOAT8) OUTPUTS(FLOAT8_GROUPS) OUTPUTS(INT4_GROUPS) OUTPUTS(UINT4_GROUPS) OUTPUTS(VALUES4) OUTPUTS(Q6_K)
#if !AVX512_BF16
OUTPUTS(Q4_K) OUTPUTS(Q5_K)
#endif
#undef OUTPUTS

#if AVX512_BF16
#include "block_panels.h"
#endif

static const Share quantized_shares[] = {quantized_outputs_INT8, quantized_outputs_INT8_GROUPS, quantized_outputs_FLOAT8, quantized_outputs_FLOAT8_GROUPS, quantized_outputs_INT4_GROUPS,
                                     quantized_outputs_UINT4_GROUPS, quantized_outputs_VALUES4, quantized_outputs_Q4_K, quantized_outputs_Q5_K, quantized_outputs_Q6_K};

FAST static void arrange_rows(const void *given, Py_ssize_t row, Py_ssize_t end) {
    const Quantized *p = given;
    for (; row < end; row++) {
        const uint16_t *x = p->plain + p->places[row] * p->columns;
        if (in_blocks(p->how)) arrange_blocks(x, p->x + row * p->stride, p->columns, p->how);
        else arrange(x, p->x + row * p->stride, p->columns, (p->bytes + step_bytes(p->how) - 1) / step_bytes(p->how), p->how);
        float *sums = p->sums + row * p->next_sums;
        if (p->next_sums && in_integers(p->how)) sum_integers(p->x + row * p->stride, sums, p->groups, p->shift);
        else if (p->next_sums) sum_groups(x, sums, p->groups, p->shift);
    }
}

static const char *multiply_quantized(const struct multiply_quantized *n) {
    const Stored how = (Stored)n->stored;
    const Py_ssize_t columns = n->columns, outputs = n->outputs;
    const char *why = unlike(how, n->stored, columns, n->groups, n->scale_kind);
    if (why) return why;
    if (n->with_tiles && takes_tiles(n)) {
        multiply_quantized_by_tiles(n);
        return NULL;
    }
    Quantized p = WEIGHT_OF(n, outputs);
    const Py_ssize_t steps = (p.bytes + bytes_in_step(how) - 1) / bytes_in_step(how), size = (Py_ssize_t)sizeof(Element);
    const Py_ssize_t padded = steps * elements_in_step(how), line = ALIGNED / size;
    const bool is_offset = has_offset(how) && !in_blocks(how);
    Py_ssize_t places[ROWS_TOGETHER_MOST];
    p.how = how, p.apart = 1, p.bias = n->bias, p.places = places, p.is_wide = n->is_wide != 0;
    // An odd number of lines from row to row: rows at multiples of a page would share few places of the nearest cache.
    p.stride = ((padded + line - 1) / line | 1) * line, p.next_sums = is_offset && !is_taken_from_steps(how) ? n->groups + FLOATS : 0;
    const Py_ssize_t fit = LARGE_ARRANGED / (p.stride * size + p.next_sums * (Py_ssize_t)sizeof *p.sums);
    // Where there are 32 registers rows are soon so many that decoding once for all of them takes less time; elsewhere only more than two times those that are multiplied at once.
    const Py_ssize_t few = REGISTERS < 32 ? 2 * ROWS_AT_ONCE : how < INT4_GROUPS ? ROWS_AT_ONCE : ROWS_AT_ONCE + 2;
    const Py_ssize_t most = (n->rows <= few && !in_panels(how)) || fit < ROWS_AT_ONCE ? ROWS_AT_ONCE : fit > ROWS_TOGETHER_MOST ? ROWS_TOGETHER_MOST : fit;
    const Py_ssize_t chunks = (n->rows + most - 1) / most;
    p.x = (Element *)(((uintptr_t)n->work + ALIGNED - 1) / ALIGNED * ALIGNED);
    p.sums = (float *)(p.x + (n->rows < most ? n->rows : most) * p.stride);
    for (Py_ssize_t chunk = 0; chunk < chunks; chunk++) {
        const Py_ssize_t row = n->rows * chunk / chunks;
        p.rows = n->rows * (chunk + 1) / chunks - row, p.usual = 0;
        p.plain = (const uint16_t *)n->x + row * columns, p.y = (char *)n->y + row * outputs * (p.is_wide ? 4 : 2);
        p.added = n->added ? (const uint16_t *)n->added + row * outputs : NULL;
        for (Py_ssize_t i = 0, last = p.rows; i < p.rows; i++)
            places[!(is_offset || in_blocks(how)) || are_usual(p.plain + i * columns, columns) ? p.usual++ : --last] = i;
        // Outputs lie one after the other, which is the order that memory likes best, unless x is larger than the nearest cache, or what is decoded.
        const bool are_few = in_integers(how) || p.usual <= ROWS_AT_ONCE;
        const Py_ssize_t at_once = p.usual < ROWS_AT_ONCE ? p.usual : ROWS_AT_ONCE, near = are_few ? at_once * elements_in_step(how) * size : PANEL_OUTPUTS * vectors_in_step(how) * VECTOR;
        const Py_ssize_t fits = are_few || !adds_at_once(how) ? (Py_ssize_t)NEAR_ARRANGED : (Py_ssize_t)NEAR_DECODED;
        const Py_ssize_t turns = (steps * near + fits - 1) / fits, fitting = fits / (near + !near);
        p.turn = turns > 1 ? are_few ? (steps + turns - 1) / turns : fitting : steps + !steps;
        p.ahead = turns > 1 ? (BYTES_AHEAD / bytes_in_step(how) / p.turn + 1) * p.bytes : takes_streams(&p, how) ? (Py_ssize_t)AHEAD_OF_STREAM : (Py_ssize_t)BYTES_AHEAD;
        const Py_ssize_t work = p.bytes * ((p.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE), together = in_panels(how) ? FLOATS : OUTPUTS_TOGETHER * (takes_streams(&p, how) ? STREAMS : 1);
        const Py_ssize_t least = (QUANTIZED_SHARE / (work + 1) / together + 1) * together;
        const unsigned threads = outputs * work < SMALL_QUANTIZED ? 1 : (unsigned)n->threads;
        const unsigned threads_of_x = p.usual * columns < SMALL_QUANTIZED ? 1 : threads;
#if AVX512_BF16
        if (in_panels(how)) in_shares(arrange_parts, &p, parts_of_rows(&p), 1, threads_of_x);
        else
#endif
        in_shares(arrange_rows, &p, p.usual, ROWS_AT_ONCE, threads_of_x);
        in_shares(quantized_shares[how], &p, outputs, least, threads);
    }
    return NULL;
}

static const char *multiply_dequantized(const struct multiply_dequantized *n) {
    const char *why = unlike((Stored)n->stored, n->stored, n->columns, n->groups, n->scale_kind);
    if (why) return why;
    if (!n->together) return refused("rows to multiply together, got 0");
    if (!has_tiles()) return refused("matrix tiles, this processor has none");
    multiply_dequantized_by_tiles(n);
    return NULL;
}
