// SPDX-License-Identifier: Apache-2.0
// Zen 4, Cooper Lake and later, which multiply bfloat16 in pairs and bytes by fours; Sapphire Rapids and later, by matrix tiles (AMX_BF16).

#if defined(__x86_64__)

#define SET avx512_bf16
#define AVX512 1
#define AVX512_BF16 1
#define BYTES_BY_FOURS 1
#define HAS_TILES (defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11))  // compilers that know them
#define VECTOR 64
#define REGISTERS 32
#define FAST __attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")))
#define RUNS \
    __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") \
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16") \
        && __builtin_cpu_supports("avx512vnni")
#include "set.h"

#endif
