# SPDX-License-Identifier: Apache-2.0
"""Kernels in C work in memory that they are given, which plans count."""

from __future__ import annotations

import random
import re

import pytest
import torch
from native_calls import call, drawn, needed, operands_of

from nnfront.backends.cpu import backend
from nnfront.backends.cpu.extension import KERNELS, NATIVE, TABLE, work_bytes
from nnfront.backends.cpu.tape_builder import MEMORY, OFFSET_BITS, TapeBuilder


def test_no_kernel_allocates():
    """The module does for each call: where its memories lie."""
    text = {path.name: path.read_text() for path in TABLE.parent.glob("*.[ch]")}
    found = {name for name, source in text.items() if re.search(r"alloc(?:a|_\w+)?\(", source, re.IGNORECASE)}
    assert found == {"module.c"}


@pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("kernel", [name for name, taken in KERNELS.items() if "work" in taken])
def test_a_kernel_writes_nothing_beside_what_it_works_in(kernel):
    for seed in range(40):
        torch.manual_seed(seed)
        sizes = drawn(kernel, random.Random(seed))
        if kernel == "multiply_quantized":
            sizes["rows"] *= 1 + seed % 3  # more than are multiplied at once
        count = needed(kernel, sizes)["work"]
        buffer = torch.full((count + 8192,), 0xA5, dtype=torch.uint8)
        call(kernel, sizes, operands_of(kernel, sizes) | {"work": buffer[4096:][:count]})
        assert (buffer[:4096] == 0xA5).all()
        assert (buffer[4096 + count :] == 0xA5).all()


def test_plans_count_what_every_kernel_in_c_that_runs_by_itself_works_in():
    assert not [kernel.name for kernel in backend.KERNELS if kernel.in_rows and kernel.workspace is None]


def test_a_kernel_works_in_memory_of_the_tape_that_others_have_afterwards():
    names = "sequences", "tokens", "count", "size", "rank", "outputs", "with_tiles"
    sizes = dict(zip(names, (2, 1, 3, 32, 4, 8, 0), strict=True))
    builder = TapeBuilder(1, {})
    for _ in range(2):
        builder.call("add_low_rank", *sizes.values(), 1, *[None] * 5, None)
    tape = builder.tape()
    assert (
        tape.size == -(-work_bytes("add_low_rank", sizes) // 64) * 64 == 64 * -(-2 * 2 * (32 + 4 + 16) // 64)
    )
    at = 2 + list(KERNELS["add_low_rank"]).index("work")
    assert tape.rows[:, at].tolist() == [MEMORY << OFFSET_BITS] * 2
