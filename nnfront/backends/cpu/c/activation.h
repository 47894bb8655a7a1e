// SPDX-License-Identifier: Apache-2.0
// Activations of vectors, in float.

#ifndef NNFRONT_ACTIVATION_H
#define NNFRONT_ACTIVATION_H

#include "native.h"

#if HAS_KERNELS

// In the order of GATES in activations.py, then nothing.
typedef enum { SILU, GELU_TANH, RELU, GELU, NOTHING } Activation;

// x times the share of the normal distribution below x, by Abramowitz and Stegun's 7.1.26: off by 2e-7 of x.
FAST INLINE __m512 by_normal(__m512 x) {
    const float series[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    const __m512 one = _mm512_set1_ps(1.0f), z = _mm512_mul_ps(_mm512_andnot_ps(_mm512_set1_ps(-0.0f), x), _mm512_set1_ps(0.707106781f));
    const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(z, _mm512_set1_ps(0.3275911f), one));
    __m512 sum = _mm512_set1_ps(1.061405429f);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(series[i]));
    const __m512 power = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(z, z)));
    const __m512 beyond = _mm512_mul_ps(_mm512_mul_ps(sum, t), _mm512_mul_ps(power, _mm512_set1_ps(0.5f)));
    const __m512 below = _mm512_mask_sub_ps(beyond, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ), one, beyond);
    return _mm512_mul_ps(x, below);
}

// x / (1 + e^-z) without an e^ that is too large; z is x, or what the approximation by tanh (Hendrycks and Gimpel, 2016) makes of it.
FAST INLINE __m512 activated(__m512 x, const Activation activation) {
    if (activation == NOTHING) return x;
    if (activation == GELU) return by_normal(x);
    if (activation == RELU) return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps());
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x), one = _mm512_set1_ps(1.0f);
    const __m512 z = activation == SILU ? x : _mm512_mul_ps(_mm512_set1_ps(1.595769122f), _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, x));
    const __m512 power = exponential(_mm512_or_ps(z, _mm512_set1_ps(-0.0f)));  // e^-|z|
    const __m512 above = _mm512_mask_mov_ps(one, _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_LT_OQ), power);
    return _mm512_div_ps(_mm512_mul_ps(x, above), _mm512_add_ps(one, power));
}

#endif
#endif
