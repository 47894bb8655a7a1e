// SPDX-License-Identifier: Apache-2.0
// CRC-32 under an emulator, for tests: calls come in on stdin (the CRC before and the number of bytes, 8 bytes each, and these), CRCs go out on stdout.

#include <stdio.h>

#include "crc32.h"

int main(void) {
    static uint8_t data[1 << 20];
    uint64_t head[2];
    if (!crc32_runs()) return 1;
    while (fread(head, sizeof *head, 2, stdin) == 2 && head[1] <= sizeof data && fread(data, 1, head[1], stdin) == head[1]) {
        head[0] = crc32_of(data, head[1], (uint32_t)head[0]);
        fwrite(head, sizeof *head, 1, stdout);
        fflush(stdout);
    }
    return 0;
}
