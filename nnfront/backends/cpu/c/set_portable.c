// SPDX-License-Identifier: Apache-2.0
// Any processor, by what compilers make of vectors of 16 bytes.

#define SET portable
#define VECTOR 16
#define REGISTERS 16
#define FAST
#define RUNS true
#include "set.h"
