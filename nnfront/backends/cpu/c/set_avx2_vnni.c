// SPDX-License-Identifier: Apache-2.0
// AVX2 that multiplies bytes by fours: Alder Lake and later. Compilers before GCC 11 and Clang 12 do not know the instruction.

#if defined(__x86_64__)

#include <cpuid.h>
#include <stdbool.h>

#define SET avx2_vnni
#define BASE avx2
#define AVX2 1
#define VECTOR 32
#define REGISTERS 16
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define BYTES_BY_FOURS 1
#define FAST __attribute__((target("avx2,fma,f16c,avxvnni")))
#define RUNS has_avx_vnni()

static inline bool has_avx_vnni(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}

#else
#define FAST __attribute__((target("avx2,fma,f16c")))
#define RUNS false
#endif

#include "set_with_base.h"

#endif
