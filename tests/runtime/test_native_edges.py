# SPDX-License-Identifier: Apache-2.0
"""Every kernel in C, by the table that says what it takes, on operands that begin and end where memory does: it reads and writes no byte more."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from native_calls import ARGUMENTS, bits, call, drawn, operands_of
from patience import HANGS_SECONDS

from nnfront.backends.cpu.extension import KERNELS, NATIVE
from nnfront.backends.cpu.tape_builder import OFFSET_BITS, ROW

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason="no kernels in C"),
    pytest.mark.usefixtures("instructions"),
]


def at_the_edge(count: int, is_end: bool) -> torch.Tensor:
    """Bytes with a page behind or before them that nobody may touch."""
    page = mmap.PAGESIZE
    inside = -(-max(count, 1) // page) * page
    memory = mmap.mmap(-1, inside + 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (0, inside + page):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + at), ctypes.c_size_t(page), 0) == 0
    first = page + inside - count if is_end else page
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=first)


def try_all(rounds: int) -> None:
    """Run every kernel on operands that are as large as the table says, at both edges; and rows of any numbers."""
    assert NATIVE is not None
    for seed in range(rounds):
        for kernel in ARGUMENTS:
            torch.manual_seed(seed)
            sizes = drawn(kernel, random.Random(seed))
            expected = operands_of(kernel, sizes)
            for is_end in (True, False):
                edged = {}
                for name, tensor in expected.items():
                    if tensor is not None and tensor.numel():
                        edged[name] = at_the_edge(tensor.numel(), is_end).copy_(tensor)
                    else:
                        edged[name] = tensor
                call(kernel, sizes, edged)
                fresh = {name: None if t is None else t.clone() for name, t in expected.items()}
                call(kernel, sizes, fresh)
                assert bits(edged) == bits(fresh), (kernel, sizes)
    pick = random.Random(0)
    memories = [None, *(at_the_edge(n, True).fill_(1) for n in (1, 64, 700, 9000)), 5, -1]
    numbers = [
        0,
        1,
        2,
        4,
        5,
        32,
        64,
        -1,
        1 << 40,
        *(i << OFFSET_BITS | o for i in range(7) for o in (0, 1, 64)),
    ]
    for _ in range(rounds * 500):
        kernel = pick.randrange(len(KERNELS))
        names = list(KERNELS.values())[kernel]
        mask = sum(
            1 << i for i, (kind, *_) in enumerate(list(ARGUMENTS.values())[kernel]) if kind in ("IN", "OUT")
        )
        mask ^= (pick.random() < 0.2) << pick.randrange(len(names))
        row = [pick.choice(numbers) if mask >> i & 1 else pick.choice(numbers[:7]) for i in range(ROW - 2)]
        try:
            NATIVE.run_sequence(torch.tensor([[kernel, mask, *row]], dtype=torch.int64), *memories)
        except (ValueError, MemoryError):
            continue
        print("ran", list(KERNELS)[kernel])


def test_no_kernel_touches_a_byte_beyond_what_the_table_says():
    done = subprocess.run(
        [sys.executable, "-c", "import test_native_edges; test_native_edges.try_all(6)"],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ran gate" in done.stdout  # some rows of any numbers make sense
