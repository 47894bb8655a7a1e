// SPDX-License-Identifier: Apache-2.0
// CRC-32 by carry-less multiplication, as fast as memory is read.

#ifndef NNFRONT_CRC32_H
#define NNFRONT_CRC32_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Whether this processor has the instructions.
bool crc32_runs(void);

// The CRC-32 (zlib's: reflected, polynomial 0x04C11DB7) of bytes behind others that have `crc`.
uint32_t crc32_of(const uint8_t *data, size_t size, uint32_t crc);

#endif
