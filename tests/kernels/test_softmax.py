# SPDX-License-Identifier: Apache-2.0
"""Softmax of rows against float64 and torch: sizes around a block, long rows, rows without a distribution, and mistakes that must show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_checks import EPS32, Guarded, assert_close, surrounded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, softmax
from nnfront_kernels.softmax import CONFIGS

SUBNORMAL = 2.0**-126  # below it exp need not be exact, and a GPU may give 0


@dataclass(frozen=True)
class Rows:
    """`spread` is the deviation of the values; `holes` says that a third of them is -inf."""

    rows: int
    size: int
    dtype: str = "float32"
    spread: float = 1.0
    mean: float = 0.0
    holes: bool = False
    gap: int = 0
    offset: int = 0
    config: int | None = None

    def __str__(self) -> str:
        return f"{self.rows}x{self.size}-{self.dtype}-spread{self.spread:g}-mean{self.mean:g}-gap{self.gap}-config{self.config}"


def weigh(package: ModuleType, rows: Rows) -> None:
    """Launch twice on poisoned outputs; AssertionError unless the weights are right."""
    generator = torch.Generator().manual_seed(rows.rows * 1000 + rows.size)
    dtype = getattr(torch, rows.dtype)
    values = rows.mean + rows.spread * torch.randn(
        rows.rows, rows.size, generator=generator, dtype=torch.float64
    )
    if rows.holes:
        values = values.masked_fill(torch.rand(values.shape, generator=generator) < 1 / 3, -math.inf)
    x = surrounded(values.to(dtype), rows.gap, rows.offset)
    config = None if rows.config is None else CONFIGS[rows.config]
    (got,) = launched_twice(
        lambda pattern: [Guarded(rows.rows, rows.size, dtype, rows.gap, rows.offset, pattern)],
        lambda views: package.softmax.plan(x, out=views[0], arch="sm_80", config=config),
    )
    z = x.double()
    below = z - z.amax(1, keepdim=True) if rows.size else z
    e = torch.exp(below)
    expected = e / e.sum(1, keepdim=True)
    # An error in the exponent is a relative one in the weight: that of z, of its difference, and of exp.
    relative = EPS32 * (8 + 2 * z.abs().nan_to_num(posinf=0) + 2 * below.abs().nan_to_num(posinf=0))
    largest = z.abs().amax(1, keepdim=True).nan_to_num(posinf=0) if rows.size else 0
    drift = (relative + 2 * EPS32 * largest) * expected + SUBNORMAL
    assert_close(actual=got, expected=expected, drift=drift)
    stated = package.softmax.reference(x, compute=torch.float64)
    assert_close(actual=stated, expected=expected, drift=drift)


SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257)
CASES = [
    *(
        Rows(
            SIZES[(5 * i + 3) % 12] if i % 5 in (1, 2) else 1 + i, size, dtype=("float16", "float32")[i % 2],
            spread=1.0 + i, mean=(0.0, 100.0)[i % 4 == 1], gap=(0, 16, 3)[i % 3], offset=i % 2, config=i % 5,
        )
        for i, size in enumerate(SIZES)
    ),
    *(Rows(3, size, dtype="float16", gap=5) for size in (2047, 2049, 4096)),
    *(Rows(2, size, spread=9.0, holes=size == 8193) for size in (8191, 8193, 20000)),
    Rows(2, 20000, dtype="float16", holes=True),
    Rows(3, 50, spread=1e4),
    Rows(9, 31, holes=True),
    Rows(0, 64),
    Rows(3, 0),
]  # fmt: skip


def weigh_here(rows: Rows) -> None:
    weigh(nnfront_kernels, rows)


@pytest.mark.parametrize("rows", few_of(CASES, 3), ids=str)
def test_softmax_matches_float64(interpreted, rows):
    interpreted(weigh_here, rows)


def without_a_distribution(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that no weights fit, and ordinary ones between them; what the kernel and what torch make of them."""
    x = torch.randn(6, size)
    x[0] = -math.inf
    x[2, size // 2] = math.nan
    x[4, size - 1] = math.inf
    x[5, : size - 1] = -math.inf
    return softmax.launch(x), torch.softmax(x, -1)


@pytest.mark.parametrize("size", [5, 300, 9000])
def test_rows_without_a_distribution_become_nan_as_in_torch_and_spare_their_neighbours(interpreted, size):
    got, expected = interpreted(without_a_distribution, size)
    assert expected[[0, 2, 4]].isnan().all()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7, equal_nan=True)


def in_place(size: int) -> None:
    x = torch.randn(3, size)
    expected = softmax.launch(x)
    assert softmax.launch(x, out=x) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("size", [100, 9000])
def test_weights_may_replace_the_values(interpreted, size):
    interpreted(in_place, size)


HERE = Rows(17, 65, mean=200.0, gap=3, spread=3.0)
LOW = Rows(17, 65, mean=-20.0)
LONG = Rows(2, 20000, mean=300.0, spread=9.0, holes=True)
MUTANTS = [
    (Mutant("largest_not_subtracted", "softmax.py", "e = tl.exp(z - finite(tl.max(z, axis=1))[:, None])", "e = tl.exp(z)"), HERE),
    (Mutant("columns_outside_counted", "softmax.py", "return tl.where(at < SIZE, z, float(\"-inf\"))", "return z"), LOW),
    (Mutant("one_row_too_many", "softmax.py", "row < ROWS", "row <= ROWS"), HERE),
    (Mutant("row_stride_of_y_is_that_of_x", "softmax.py", "row.to(tl.int64) * stride_ym", "row.to(tl.int64) * SIZE"), HERE),
    (Mutant("sums_keep_their_old_maximum", "softmax.py", "total * tl.exp(before - finite(largest))", "total"), LONG),
    (Mutant("columns_keep_their_own_maximum", "softmax.py", "total * tl.exp(largest - top)", "total"), LONG),
    (Mutant("last_step_alone", "softmax.py", "total = total * tl.exp(before - finite(largest)) + tl.exp", "total = tl.exp"), LONG),
    (Mutant("nan_of_empty_columns", "softmax.py", "tl.where(largest == float(\"-inf\"), 0.0, largest)", "largest"), LONG),
]  # fmt: skip


def run_mutant(mutant: Mutant, rows: Rows) -> None:
    weigh(package(mutant), rows)


@pytest.mark.parametrize(("mutant", "rows"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_the_softmax_is_caught(interpreted, mutant, rows):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, rows)


@pytest.mark.parametrize("rows", [HERE, LOW, LONG], ids=str)
@pytest.mark.matrix
def test_the_softmax_without_the_mistake_passes(interpreted, rows):
    interpreted(run_mutant, Mutant("none", "", "", ""), rows)


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"x": tensor(2, 3, 8)}, r"x must have shape \[any, 8\], got \[2, 3, 8\]"),
    ({"x": tensor(8, 4).T}, r"x must have adjacent elements along its last axis, got strides \[1, 4\]"),
    ({"out": tensor(4, 8, dtype=torch.float32)}, "out must be torch.float16, got torch.float32"),
    ({"x": tensor(4, 8, dtype=torch.float64)}, "softmax: dtype must be one of float16, bfloat16, float32, got 'float64'"),
    ({"x": tensor(2**31, 8)}, r"softmax: there must be less than 2\^31 rows, got 2147483648"),
    ({"arch": "sm_70"}, "softmax: arch must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[-30:] for _, message in WRONG])
def test_softmax_says_what_does_not_fit(changes, message):
    arguments = {"x": tensor(4, 8), "arch": "sm_90", **changes}
    with pytest.raises(KernelError, match=message):
        softmax.plan(arguments.pop("x"), **arguments)
