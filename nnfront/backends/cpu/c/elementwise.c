// SPDX-License-Identifier: Apache-2.0
// What models compute on each element between the kernels of a token, in float and with one rounding, and copies into another order: plain loops over
// pieces of rows, for the compiler to make vectors of.

#include <math.h>

#include "kinds.h"

// In the order of OPERATIONS in elementwise.py.
typedef enum {
    EACH_COPY, EACH_ADD, EACH_SUBTRACT, EACH_SUBTRACT_FROM, EACH_MULTIPLY, EACH_DIVIDE, EACH_DIVIDE_BY, EACH_EQUAL,
    EACH_SELECT, EACH_PUT, EACH_MINIMUM, EACH_MAXIMUM, EACH_GREATER, EACH_GREATER_EQUAL, EACH_LESS, EACH_LESS_EQUAL, EACH_RELU, EACH_ABS, EACH_NEGATIVE, EACH_EXP, EACH_SIGMOID, EACH_SILU, EACH_TANH, EACH_SOFTPLUS, EACH_RSQRT, EACH_COS, EACH_SIN,
} Operation;

enum {
    PIECE = 512,     // elements at a time
    SMALL_COUNT = 1 << 14, // elements that take less time than waking threads
};

// e^x as 2^n e^r with |r| <= ln 2 / 2, and e^r by its series; 2^n in two factors, as the greatest n is beyond a float. A NaN stays one.
FAST INLINE float power_of_e(float x) {
    const float most = x > 89.0f ? 89.0f : x, in_range = most < -87.3f ? -87.3f : most;
    const float shifted = in_range * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;  // rounded to an integer, in the lowest bits of the first
    const float r = in_range - n * 0.693359375f + n * 2.12194440e-4f;
    const float series = 1.0f + r * (1.0f + r * (0.5f + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720))))));
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    const int32_t whole = bits - 0x4B400000, half = whole >> 1, powers[] = {(half + 127) << 23, (whole - half + 127) << 23};
    float first, second;
    memcpy(&first, powers, sizeof first);
    memcpy(&second, powers + 1, sizeof second);
    return x < -87.3f ? 0.0f : series * first * second;
}

FAST INLINE float sigmoid_of(float x) {
    const float power = power_of_e(-fabsf(x)), above = 1.0f / (1.0f + power);
    return x < 0.0f ? power * above : above;
}

// Near zero by a polynomial (Cephes), elsewhere by e^2x.
FAST INLINE float tanh_of(float x) {
    const float z = x * x, size = fabsf(x), far = 1.0f - 2.0f / (power_of_e(2.0f * size) + 1.0f);
    const float inner = (((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z + 1.33314422036e-1f) * z - 3.33332819422e-1f;
    const float near = x + x * z * inner;
    return size < 0.625f ? near : copysignf(far, x);
}

FAST INLINE void load_piece(float *to, const void *from, Kind kind, Py_ssize_t step, Py_ssize_t count) {
    if (kind == BFLOAT16 && step == 1)
        for (Py_ssize_t i = 0; i < count; i++) to[i] = widened(((const uint16_t *)from)[i]);
    else if (kind == FLOAT32 && step == 1)
        memcpy(to, from, (size_t)count * sizeof *to);
    else
        for (Py_ssize_t i = 0; i < count; i++) to[i] = value_at(from, kind, i * step);
}

FAST INLINE void store_piece(const float *from, void *to, Kind kind, Py_ssize_t step, Py_ssize_t count) {
    if (kind == FLOAT32 && step == 1)
        memcpy(to, from, (size_t)count * sizeof *from);
    else if (kind == BFLOAT16 && step == 1)
        for (Py_ssize_t i = 0; i < count; i += FLOATS) store_rounded((uint16_t *)to + i, first_lanes(count - i), floats(from + i));
    else
        for (Py_ssize_t i = 0; i < count; i++) put_value(to, kind, i * step, from[i]);
}

#define EACH(value) \
    for (Py_ssize_t i = 0; i < count; i++) y[i] = (value); \
    break

FAST INLINE void compute(Operation operation, float *y, const float *x, const float *other, float number, Py_ssize_t count) {
    switch (operation) {
        case EACH_COPY: EACH(x[i]);
        case EACH_ADD: EACH(x[i] + other[i]);
        case EACH_SUBTRACT: EACH(x[i] - other[i]);
        case EACH_SUBTRACT_FROM: EACH(other[i] - x[i]);
        case EACH_MULTIPLY: EACH(x[i] * other[i]);
        case EACH_DIVIDE: EACH(x[i] / other[i]);
        case EACH_DIVIDE_BY: EACH(other[i] / x[i]);
        case EACH_EQUAL: EACH(x[i] == other[i] ? 1.0f : 0.0f);
        case EACH_SELECT: EACH(x[i] != 0.0f ? other[i] : number);
        case EACH_PUT: EACH(x[i] != 0.0f ? other[i] : y[i]);
        case EACH_MINIMUM: EACH(x[i] < other[i] || x[i] != x[i] ? x[i] : other[i]);
        case EACH_MAXIMUM: EACH(x[i] > other[i] || x[i] != x[i] ? x[i] : other[i]);
        case EACH_GREATER: EACH(x[i] > other[i] ? 1.0f : 0.0f);
        case EACH_GREATER_EQUAL: EACH(x[i] >= other[i] ? 1.0f : 0.0f);
        case EACH_LESS: EACH(x[i] < other[i] ? 1.0f : 0.0f);
        case EACH_LESS_EQUAL: EACH(x[i] <= other[i] ? 1.0f : 0.0f);
        case EACH_RELU: EACH(x[i] < 0.0f ? 0.0f : x[i]);
        case EACH_ABS: EACH(fabsf(x[i]));
        case EACH_NEGATIVE: EACH(-x[i]);
        case EACH_EXP: EACH(power_of_e(x[i]));
        case EACH_SIGMOID: EACH(sigmoid_of(x[i]));
        case EACH_SILU: EACH(x[i] * sigmoid_of(x[i]));
        case EACH_TANH: EACH(tanh_of(x[i]));
        case EACH_SOFTPLUS: EACH(x[i] > number ? x[i] : log1pf(power_of_e(x[i])));
        case EACH_RSQRT: EACH(1.0f / sqrtf(x[i]));
        case EACH_COS: EACH(cosf(x[i]));
        case EACH_SIN: EACH(sinf(x[i]));
    }
}

INLINE Py_ssize_t item(Py_ssize_t kind) { return kind == BFLOAT16 ? 2 : kind == BOOL ? 1 : kind == INT64 ? 8 : 4; }

FAST static void compute_pieces(const void *given, Py_ssize_t first, Py_ssize_t end) {
    const struct elementwise *n = given;
    const Py_ssize_t pieces = (n->n3 + PIECE - 1) / PIECE;
    float x[PIECE + FLOATS], other[PIECE + FLOATS], y[PIECE + FLOATS];
    for (int i = 0; i < PIECE && !n->other; i++) other[i] = (float)n->number;
    for (Py_ssize_t at = first; at < end; at++) {
        const Py_ssize_t row = at / pieces, from = at % pieces * PIECE, count = n->n3 - from < PIECE ? n->n3 - from : PIECE;
        const Py_ssize_t c = row % n->n2, b = row / n->n2 % n->n1, a = row / n->n2 / n->n1;
        const char *of_x = (const char *)n->x + item(n->x_kind) * (a * n->x0 + b * n->x1 + c * n->x2 + from * n->x3);
        const char *of_other = n->other ? (const char *)n->other + item(n->other_kind) * (a * n->other0 + b * n->other1 + c * n->other2 + from * n->other3) : NULL;
        char *of_y = (char *)n->y + item(n->y_kind) * (a * n->y0 + b * n->y1 + c * n->y2 + from * n->y3);
        load_piece(x, of_x, (Kind)n->x_kind, n->x3, count);
        if (n->other) load_piece(other, of_other, (Kind)n->other_kind, n->other3, count);
        if (n->operation == EACH_PUT) load_piece(y, of_y, (Kind)n->y_kind, n->y3, count);
        compute((Operation)n->operation, y, x, other, (float)n->number, count);
        store_piece(y, of_y, (Kind)n->y_kind, n->y3, count);
    }
}

static const char *elementwise(const struct elementwise *n) {
    if (n->x_kind > INT64 || n->other_kind > INT64 || n->y_kind > BOOL || n->operation > EACH_SIN) return refused("an operation and kinds that there are");
    const Py_ssize_t rows = n->n0 * n->n1 * n->n2, count = rows * n->n3;
    if (count) in_shares(compute_pieces, n, rows * ((n->n3 + PIECE - 1) / PIECE), 1, count < SMALL_COUNT ? 1 : (unsigned)n->threads);
    return NULL;
}
