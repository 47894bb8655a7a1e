// SPDX-License-Identifier: Apache-2.0
// Tensors of several kinds, of which one element is read or written at a time, as a float.

#ifndef NNFRONT_KINDS_H
#define NNFRONT_KINDS_H

#include "words.h"

// In the order of KINDS in elementwise.py.
typedef enum { BFLOAT16, FLOAT32, BOOL, INT32, INT64 } Kind;

INLINE float value_at(const void *from, Py_ssize_t kind, Py_ssize_t at) {
    if (kind == BFLOAT16) return widened(((const uint16_t *)from)[at]);
    if (kind == FLOAT32) return ((const float *)from)[at];
    if (kind == INT64) return (float)((const int64_t *)from)[at];
    return kind == BOOL ? (float)((const uint8_t *)from)[at] : (float)((const int32_t *)from)[at];
}

// Of these kinds but integers.
INLINE void put_value(void *to, Py_ssize_t kind, Py_ssize_t at, float value) {
    if (kind == BFLOAT16)
        ((uint16_t *)to)[at] = rounded(value);
    else if (kind == FLOAT32)
        ((float *)to)[at] = value;
    else
        ((uint8_t *)to)[at] = value != 0.0f;
}

#endif
