// SPDX-License-Identifier: Apache-2.0
// Activations of vectors, in float.

#ifndef NNFRONT_ACTIVATION_H
#define NNFRONT_ACTIVATION_H

#include "words.h"

// In the order of GATES in activations.py, then nothing.
typedef enum { SILU, GELU_TANH, RELU, GELU, NOTHING } Activation;

// x times the share of the normal distribution below x, by Abramowitz and Stegun's 7.1.26: off by 2e-7 of x.
FAST INLINE Floats by_normal(Floats x) {
    const float series[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    const Floats z = absolute(x) * 0.707106781f, t = 1.0f / fused(z, all(0.3275911f), all(1.0f));
    Floats sum = all(1.061405429f);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sum = fused(sum, t, all(series[i]));
    const Floats beyond = (sum * t) * (exponential(-(z * z)) * 0.5f);
    return x * where_less(x, all(0.0f), beyond, 1.0f - beyond);
}

// x / (1 + e^-z) without an e^ that is too large; z is x, or what the approximation by tanh (Hendrycks and Gimpel, 2016) makes of it.
FAST INLINE Floats activated(Floats x, const Activation activation) {
    if (activation == NOTHING) return x;
    if (activation == GELU) return by_normal(x);
    if (activation == RELU) return where_less(x, all(0.0f), all(0.0f), x);
    const Floats z = activation == SILU ? x : 1.595769122f * fused(all(0.044715f), x * x * x, x);
    const Floats power = exponential(negative(z));
    return x * where_less(z, all(0.0f), power, all(1.0f)) / (power + 1.0f);
}

#endif
