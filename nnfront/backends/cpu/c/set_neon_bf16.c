// SPDX-License-Identifier: Apache-2.0
// arm64 that multiplies bfloat16 in pairs: Neoverse V1 and N2, Graviton 3, and later.

#if defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

#define SET neon_bf16
#define NEON 1
#define NEON_BF16 1
#define VECTOR 16
#define REGISTERS 32
// Compilers write 2^-7 in bfloat16 as 1 in float16, so that assemblers have to know that too; processors with the one have the other.
#define FAST __attribute__((target("arch=armv8.2-a+bf16+fp16")))
#define RUNS ((getauxval(AT_HWCAP2) >> 14 & 1) && (getauxval(AT_HWCAP) >> 10 & 1))  // HWCAP2_BF16, HWCAP_ASIMDHP
#include "set.h"

#endif
