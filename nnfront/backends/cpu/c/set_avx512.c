// SPDX-License-Identifier: Apache-2.0
// Skylake's servers, and the base of those that multiply bytes by fours.

#if defined(__x86_64__)

#define SET avx512
#define AVX512 1
#define VECTOR 64
#define REGISTERS 32
#define FAST __attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define RUNS \
    __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") \
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
#include "set.h"

#endif
