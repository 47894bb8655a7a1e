// SPDX-License-Identifier: Apache-2.0
// AVX512 that multiplies bytes by fours, and no bfloat16: Cascade Lake, Ice Lake, Tiger Lake.

#if defined(__x86_64__)

#define SET avx512_vnni
#define BASE avx512
#define AVX512 1
#define BYTES_BY_FOURS 1
#define VECTOR 64
#define REGISTERS 32
#define FAST __attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define RUNS __builtin_cpu_supports("avx512vnni")
#include "set_with_base.h"

#endif
