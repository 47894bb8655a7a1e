# SPDX-License-Identifier: Apache-2.0
"""Rows copied from a buffer and back, wherever it lies: the same bits, zeros for rows of nobody, nothing beside what is asked for."""

from __future__ import annotations

from types import ModuleType

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, copy_rows

ROWS = 21


def agree(kernels: ModuleType, width: int, dtype: str, moved: int) -> None:
    """Read rows of a buffer that lies `moved` times 16 bytes behind another, and write others."""
    generator = torch.Generator().manual_seed(width)
    buffer = torch.randint(
        0, 256, (ROWS * width * 8 + 16 * abs(moved),), dtype=torch.uint8, generator=generator
    )
    whole = buffer[: len(buffer) // 16 * 16].clone()
    there = whole.view(getattr(torch, dtype))[: ROWS * width].view(ROWS, width)
    lies = whole[16 * moved :].view(getattr(torch, dtype))[: ROWS * width].view(ROWS, width)
    at = torch.randperm(ROWS, generator=generator)[: ROWS - 4]
    at[::5] = -1
    base = torch.tensor([7, moved])
    found = kernels.copy_rows.launch(there, at, base=base, index=1)
    stated = copy_rows.reference(lies, at)
    assert torch.equal(found.view(torch.uint8), stated.view(torch.uint8))
    new = torch.randint(
        0, 256, (len(at), width * there.element_size()), dtype=torch.uint8, generator=generator
    )
    expected = whole.clone()
    copy_rows.reference(
        expected[16 * moved :].view(there.dtype)[: ROWS * width].view(ROWS, width), at, new.view(there.dtype)
    )
    kernels.copy_rows.launch(there, at, new.view(there.dtype), base=base, index=1)
    assert torch.equal(whole, expected)


def as_it_is(width: int, dtype: str, moved: int) -> None:
    agree(nnfront_kernels, width, dtype, moved)


@pytest.mark.parametrize(
    ("width", "dtype", "moved"),
    few_of(
        [(64, "float16", 3), (1, "float32", 5), (3, "uint8", 1), (128, "float32", 0), (2050, "bfloat16", 2), (24, "int64", 9)], 3
    ),
)  # fmt: skip
def test_rows_are_copied_bit_for_bit_from_where_they_lie_and_back(interpreted, width, dtype, moved):
    interpreted(as_it_is, width, dtype, moved)


MUTANTS = [
    Mutant("no_base", "copy_rows.py", "tl.load(base_ptr + index)", "0"),
    Mutant("rows_of_nobody_are_read", "copy_rows.py", "is_there = (at >= 0)[:, None]", "is_there = (at >= -1)[:, None]"),
    Mutant("one_row_for_all", "copy_rows.py", "(at * WIDTH)", "(0 * at)"),
]  # fmt: skip


def mutated(mutant: Mutant) -> None:
    agree(package(mutant), 24, "float16", 3)


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_wrong_rows_are_caught(interpreted, mutant):
    with pytest.raises(AssertionError):
        interpreted(mutated, mutant)


def test_what_does_not_fit_is_refused():
    there, at = torch.zeros(4, 8), torch.zeros(2, dtype=torch.int64)
    for arguments, message in (
        ((there.mT, at), "there must have adjacent elements in a row"),
        ((there, torch.zeros(2, 2, dtype=torch.int64)[:, 0]), "at must be a dense"),
        ((there, at.int()), "at must be int64"),
        ((there, at, torch.zeros(2, 7)), "rows must be a dense"),
        ((there, at, torch.zeros(2, 8).half()), "rows must be a dense"),
    ):
        with pytest.raises(KernelError, match=message):
            copy_rows.plan(*arguments, arch="sm_90")
