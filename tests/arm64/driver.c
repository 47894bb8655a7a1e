// SPDX-License-Identifier: Apache-2.0
// Runs kernels in C under an emulator, for tests: calls come in on stdin, results go out on stdout (`emulated.py`).
//
// A call is the number of a kernel (8 bytes, as all numbers), then what it takes: numbers, and of operands how many bytes and these, or -1. The answer is
// how long a refusal is, the refusal, and the bytes of all operands that are written. Without the name of a set, prints those that this processor runs.

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "native.h"

void in_shares(Share share, const void *work, Py_ssize_t count, Py_ssize_t least, unsigned threads) {
    for (Py_ssize_t first = 0; first < count; first += least > 1 ? least : 1) {
        const Py_ssize_t end = first + (least > 1 ? least : 1);
        share(work, first, end < count ? end : count);
    }
}

const char *refused(const char *format, ...) {
    static char text[160];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    return text;
}

#define LISTED(set) &kernels_##set,
static const Kernels *const sets[] = {FOR_EACH_SET(LISTED)};

#define KERNEL(name, arguments) \
    static const char kinds_of_##name[] = {arguments}; \
    static const char *call_##name(const Kernels *set, const int64_t *numbers) { \
        struct name n; \
        memcpy(&n, numbers, sizeof n); \
        return FUNCTION_OF(set, name)(&n); \
    }
#define SIZE(name) 'n',
#define REAL(name) 'n',
#define IN(name, bytes) 'i',
#define OUT(name, bytes) 'o',
#include "kernels.def"

#define KERNEL(name, arguments) {sizeof kinds_of_##name, kinds_of_##name, call_##name},
static const struct {
    int count;
    const char *kinds;
    const char *(*call)(const Kernels *set, const int64_t *numbers);
} entries[] = {
#include "kernels.def"
};

static void read_all(void *to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) exit(2);
}

int main(int count, char **arguments) {
    const Kernels *set = NULL;
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++)
        if (sets[i]->runs()) {
            if (count == 1) puts(sets[i]->set);
            else if (!strcmp(sets[i]->set, arguments[1])) set = sets[i];
        }
    if (!set) return count > 1;
    int64_t kernel;
    while (fread(&kernel, sizeof kernel, 1, stdin) == 1) {
        int64_t numbers[64], bytes[64];
        for (int i = 0; i < entries[kernel].count; i++) {
            read_all(numbers + i, sizeof *numbers);
            if (entries[kernel].kinds[i] == 'n') continue;
            bytes[i] = numbers[i];
            void *memory = bytes[i] < 0 ? NULL : malloc((size_t)bytes[i] + 1);
            if (memory) read_all(memory, (size_t)bytes[i]);
            memcpy(numbers + i, &memory, sizeof memory);
        }
        const char *why = entries[kernel].call(set, numbers);
        const int64_t length = why ? (int64_t)strlen(why) : 0;
        fwrite(&length, sizeof length, 1, stdout);
        fwrite(why, 1, (size_t)length, stdout);
        for (int i = 0; i < entries[kernel].count; i++) {
            if (entries[kernel].kinds[i] == 'n') continue;
            if (entries[kernel].kinds[i] == 'o' && bytes[i] > 0) fwrite((void *)numbers[i], 1, (size_t)bytes[i], stdout);
            free((void *)numbers[i]);
        }
        fflush(stdout);
    }
    return 0;
}
