// SPDX-License-Identifier: Apache-2.0
// Rows of a weight in few bits as bfloat16: a piece of it that stays in a near cache, where products of many rows find it.

#include "rounded.h"

#define ROWS(how) \
    FAST static void rounded_rows_##how(const void *given, Py_ssize_t at, Py_ssize_t end) { \
        const Quantized *p = given; \
        for (; at < end; at++) round_columns(p, how, at, 0, p->columns, (uint16_t *)p->y + at * p->columns); \
    }
ROWS(INT8) ROWS(INT8_GROUPS) ROWS(FLOAT8) ROWS(FLOAT8_GROUPS) ROWS(INT4_GROUPS) ROWS(UINT4_GROUPS) ROWS(VALUES4) ROWS(Q4_K) ROWS(Q5_K) ROWS(Q6_K)
#undef ROWS

static const Share row_shares[] = {rounded_rows_INT8, rounded_rows_INT8_GROUPS, rounded_rows_FLOAT8, rounded_rows_FLOAT8_GROUPS, rounded_rows_INT4_GROUPS,
                                   rounded_rows_UINT4_GROUPS, rounded_rows_VALUES4, rounded_rows_Q4_K, rounded_rows_Q5_K, rounded_rows_Q6_K};

static const char *dequantize(const struct dequantize *n) {
    enum { LEAST = 1 << 14 };  // numbers that take less time than waking threads
    const Stored how = (Stored)n->stored;
    const char *why = unlike(how, n->stored, n->columns, n->groups, n->scale_kind);
    if (why) return why;
    Quantized p = WEIGHT_OF(n, n->rows);
    p.y = n->y;
    in_shares(row_shares[how], &p, n->rows, LEAST / (n->columns + 1) + 1, n->rows * n->columns < LEAST ? 1 : (unsigned)n->threads);
    return NULL;
}
