// SPDX-License-Identifier: Apache-2.0
// arm64 that multiplies bfloat16 in pairs, and bytes by fours: Neoverse V1 and N2, Graviton 3, and later.

#if defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

#define SET neon_bf16
#define NEON 1
#define NEON_BF16 1
#define BYTES_BY_FOURS 1
#define VECTOR 16
#define REGISTERS 32
#define FAST __attribute__((target("arch=armv8.2-a+bf16+dotprod")))
#define RUNS (getauxval(AT_HWCAP2) >> 14 & getauxval(AT_HWCAP) >> 20 & 1)  // HWCAP2_BF16, HWCAP_ASIMDDP
#include "set.h"

#endif
