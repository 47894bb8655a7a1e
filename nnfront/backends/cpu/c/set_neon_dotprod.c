// SPDX-License-Identifier: Apache-2.0
// arm64 that multiplies bytes by fours: Cortex-A76, Neoverse N1, Graviton 2, and later; Apple's of which the compiler says so.

#if defined(__aarch64__) && (defined(__linux__) || (defined(__APPLE__) && defined(__ARM_FEATURE_DOTPROD)))

#define SET neon_dotprod
#define BASE neon
#define NEON 1
#define BYTES_BY_FOURS 1
#define VECTOR 16
#define REGISTERS 32
#if defined(__linux__)
#include <sys/auxv.h>

#define FAST __attribute__((target("arch=armv8.2-a+dotprod")))
#define RUNS (getauxval(AT_HWCAP) >> 20 & 1)  // HWCAP_ASIMDDP
#else
#define FAST
#define RUNS true
#endif
#include "set_with_base.h"

#endif
