// SPDX-License-Identifier: Apache-2.0
// Haswell and later, Zen: nearly every x86 of today.

#if defined(__x86_64__)

#define SET avx2
#define AVX2 1
#define VECTOR 32
#define REGISTERS 16
#define FAST __attribute__((target("avx2,fma,f16c")))
#define RUNS __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
#include "set.h"

#endif
