# SPDX-License-Identifier: Apache-2.0
"""Measure what the machine allows. Usage: limits.py FILE. Prints JSON.

read_gb_s: the best of several ways to read a gigabyte of memory once with two threads. file_s: seconds to read FILE, which is in the
page cache, in pieces that stay in the processor's cache.
"""

import json
import os
import sys
import time

import torch

torch.set_num_threads(2)


def best(function, repeats=5):
    """Return the least seconds of several calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


words = torch.ones(2**28, dtype=torch.float32)
matrix = torch.ones((2**16, 2**13), dtype=torch.bfloat16)
vector = torch.ones(2**13, dtype=torch.bfloat16)
gigabytes = {
    "sum": words.nbytes / 1e9 / best(words.sum),
    "mv": matrix.nbytes / 1e9 / best(lambda: torch.mv(matrix, vector)),
}
buffer = bytearray(2**20)


def read():
    with open(sys.argv[1], "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while file.readinto(buffer):
            pass


read()
print(json.dumps({"read_gb_s": max(gigabytes.values()), "by": gigabytes, "file_s": best(read, 3)}))
