# SPDX-License-Identifier: Apache-2.0
"""Kernels in C work in memory that they are given, which plans count."""

from __future__ import annotations

import re

from nnfront.backends.cpu import backend
from nnfront.backends.cpu.extension import KERNELS, TABLE, work_bytes
from nnfront.backends.cpu.tape_builder import MEMORY, OFFSET_BITS, TapeBuilder

# Files with a call that allocates, and what for.
ALLOCATES = {
    "module.c": "where each memory of a call lies: 24 bytes",
    "experts.c": "a product for each expert that was chosen",
    "quantized.c": "up to 8 rows of x in the order of a weight's numbers",
    "quantized_tiles.c": "sums of up to 64 rows of x, with matrix tiles",
    "tiles.c": "up to 64 rows of x as matrix tiles take them",
}


def test_kernels_allocate_nothing_but_what_is_listed():
    text = {path.name: path.read_text() for path in TABLE.parent.glob("*.[ch]")}
    found = {name for name, source in text.items() if re.search(r"alloc(?:a|_\w+)?\(", source, re.IGNORECASE)}
    assert found == set(ALLOCATES)


def test_plans_count_what_every_kernel_in_c_that_runs_by_itself_works_in():
    assert not [kernel.name for kernel in backend.KERNELS if kernel.in_rows and kernel.workspace is None]


def test_a_kernel_works_in_memory_of_the_tape_that_others_have_afterwards():
    sizes = dict(
        zip(("sequences", "tokens", "count", "size", "rank", "outputs"), (2, 1, 3, 32, 4, 8), strict=True)
    )
    builder = TapeBuilder(1, {})
    for _ in range(2):
        builder.call("add_low_rank", *sizes.values(), 0, 1, *[None] * 5, None)
    tape = builder.tape()
    assert (
        tape.size == -(-work_bytes("add_low_rank", sizes) // 64) * 64 == 64 * -(-2 * 3 * (32 + 4 + 16) // 64)
    )
    at = 2 + list(KERNELS["add_low_rank"]).index("work")
    assert tape.rows[:, at].tolist() == [MEMORY << OFFSET_BITS] * 2
