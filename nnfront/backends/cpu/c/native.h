// SPDX-License-Identifier: Apache-2.0
// What the kernels in C share, whatever the instruction set: how they are called, the threads that they run on, bfloat16.

#ifndef NNFRONT_NATIVE_H
#define NNFRONT_NATIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

#define INLINE static inline __attribute__((always_inline))

typedef ssize_t Py_ssize_t;  // as in Python.h, which the kernels do without
_Static_assert(sizeof(Py_ssize_t) == 8 && sizeof(void *) == 8 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "64 bits, the lowest byte first");

// Work on the parts `first` to `end` of what `work` describes.
typedef void (*Share)(const void *work, Py_ssize_t first, Py_ssize_t end);

// Let threads work on `count` parts. Each takes a share of what is left whenever it is done, in multiples of `least`: long streams are what memory
// likes, and the short ones at the end let threads stop together, though they do not all get the same from memory. Without the GIL.
void in_shares(Share share, const void *work, Py_ssize_t count, Py_ssize_t least, unsigned threads);

// What each kernel takes. Its operands are as large as the table says.
#define KERNEL(name, arguments) \
    struct name { \
        arguments \
    };
#define SIZE(name) Py_ssize_t name;
#define REAL(name) double name;
#define IN(name, bytes) const void *name;
#define OUT(name, bytes) void *name;
#include "kernels.def"

// The kernels for an instruction set: what it is called, whether this processor has it, whether it multiplies tiles, and the functions, which return
// NULL, or why they did nothing. Without the GIL. What a set does not have (NULL) is its base's.
#define KERNEL(name, arguments) const char *(*name)(const struct name *n);
typedef struct Kernels {
    const char *set;
    const struct Kernels *base;
    bool (*runs)(void), (*has_tiles)(void);
#include "kernels.def"
} Kernels;
#define FUNCTION_OF(set, name) ((set)->name ? (set)->name : (set)->base->name)

// The sets of instructions for which there are kernels, the fastest first.
#if defined(__x86_64__)
#define FOR_EACH_SET(set) set(avx512_bf16) set(avx512_vnni) set(avx512) set(avx2_vnni) set(avx2) set(portable)
#elif defined(__aarch64__) && defined(__linux__)
#define FOR_EACH_SET(set) set(neon_bf16) set(neon_dotprod) set(neon) set(portable)
#elif defined(__aarch64__) && defined(__APPLE__) && defined(__ARM_FEATURE_DOTPROD)
#define FOR_EACH_SET(set) set(neon_dotprod) set(neon) set(portable)
#elif defined(__aarch64__)
#define FOR_EACH_SET(set) set(neon) set(portable)
#else
#define FOR_EACH_SET(set) set(portable)
#endif

#define KERNELS_OF_(set) kernels_##set
#define KERNELS_OF(set) KERNELS_OF_(set)
#define DECLARED(set) extern const Kernels kernels_##set;
FOR_EACH_SET(DECLARED)
#undef DECLARED
#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

// Why a kernel does nothing, until the next call of the same thread.
const char *refused(const char *format, ...);

INLINE Py_ssize_t least(Py_ssize_t a, Py_ssize_t b) { return a < b ? a : b; }
INLINE Py_ssize_t most(Py_ssize_t a, Py_ssize_t b) { return a > b ? a : b; }
INLINE Py_ssize_t rounded_up(Py_ssize_t count, Py_ssize_t to) { return (count + to - 1) / to * to; }

INLINE float widened(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// To the nearest, ties to even; a NaN stays one.
INLINE uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

#endif
