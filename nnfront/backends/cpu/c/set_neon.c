// SPDX-License-Identifier: Apache-2.0
// Every arm64.

#if defined(__aarch64__)

#define SET neon
#define NEON 1
#define VECTOR 16
#define REGISTERS 32
#define FAST
#define RUNS true
#include "set.h"

#endif
