# SPDX-License-Identifier: Apache-2.0
"""Norms of rows against float64: sizes around a block, heads inside of rows, sums in place, and mistakes that must show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_checks import EPS32, TOLERANCES, Guarded, assert_close, surrounded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, rms_norm
from nnfront_kernels.rms_norm import CONFIGS


@dataclass(frozen=True)
class Rows:
    """tokens x heads rows; heads 0 is a matrix. `config` indexes CONFIGS, None is the kernel's choice."""

    tokens: int
    size: int
    heads: int = 0
    dtype: str = "float16"
    residual: bool = False
    weighted: bool = True
    gap: int = 0
    offset: int = 0
    eps: float = 1e-6
    config: int | None = None

    def __str__(self) -> str:
        return f"{self.tokens}x{self.heads}x{self.size}-{self.dtype}-gap{self.gap}-config{self.config}{'-residual' * self.residual}"


def normalise(package: ModuleType, rows: Rows) -> None:
    """Launch twice on poisoned outputs; AssertionError unless sums and norms are right."""
    generator = torch.Generator().manual_seed(rows.tokens * 1000 + rows.size)
    dtype = getattr(torch, rows.dtype)
    count = rows.tokens * max(rows.heads, 1)

    def values() -> torch.Tensor:
        magnitude = torch.exp2(2 * torch.randn(count, 1, generator=generator, dtype=torch.float64))
        return magnitude * torch.randn(count, rows.size, generator=generator, dtype=torch.float64)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return shaped(surrounded(tensor.to(dtype), rows.gap, rows.offset))

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        if not rows.heads or rows.gap % 2 == 0:
            return tensor.unflatten(0, (rows.tokens, rows.heads)) if rows.heads else tensor
        return tensor.unflatten(0, (rows.heads, rows.tokens)).transpose(
            0, 1
        )  # heads further apart than tokens

    x, residual = place(values()), place(values()) if rows.residual else None
    weight = torch.randn(rows.size, generator=generator).to(torch.float32 if rows.gap else dtype)
    weight = weight if rows.weighted else None
    options = {"eps": rows.eps, "residual": residual}
    config = None if rows.config is None else CONFIGS[rows.config]
    got = launched_twice(
        lambda pattern: [
            Guarded(count, rows.size, dtype, rows.gap, rows.offset, pattern)
            for _ in range(1 + rows.residual)
        ],
        lambda views: package.rms_norm.plan(
            x, weight, **options, out=shaped(views[0]), total=shaped(views[1]) if rows.residual else None, arch="sm_80", config=config
        ),
    )  # fmt: skip
    s = x
    if residual is not None:
        exact = x.double() + residual.double()
        s = shaped(got[1])
        assert_close(
            actual=got[1], expected=flat(exact, got[1], rows), drift=EPS32 * flat(exact, got[1], rows).abs()
        )
    wide = flat(s.double(), got[0], rows)
    w = 1.0 if weight is None else weight.double()
    expected = wide / ((wide * wide).sum(1, keepdim=True) / rows.size + rows.eps) ** 0.5 * w
    assert_close(actual=got[0], expected=expected, drift=8 * EPS32 * expected.abs())
    stated = package.rms_norm.reference(x, weight, **options, compute=torch.float64)
    stated = stated if residual is None else stated[1]
    close = torch.isclose(flat(stated, got[0], rows), got[0], rtol=4 * TOLERANCES[dtype].unit, atol=1e-6)
    assert close.all(), "differs from the stated definition"


def flat(tensor: torch.Tensor, like: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The rows of a tensor in the order in which the buffer of `like` holds them."""
    if tensor.ndim == 3 and rows.gap % 2:
        tensor = tensor.transpose(0, 1)
    return tensor.reshape(like.shape)


SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257)
CASES = [
    *(
        Rows(SIZES[(5 * i + 3) % 12] if i % 5 in (1, 2) else 1 + i, size, dtype=("float16", "float32")[i % 2], residual=i % 3 == 1, gap=(0, 16, 3)[i % 3], offset=i % 2, config=i % 5)
        for i, size in enumerate(SIZES)
    ),
    *(Rows(t, size, heads=h, gap=g) for t, h, size, g in ((5, 3, 64, 0), (3, 7, 80, 5), (17, 1, 96, 16), (1, 8, 128, 3), (2, 4, 256, 0))),
    *(Rows(3, size, residual=True, dtype=dtype, gap=7) for size in (2047, 2049, 4096) for dtype in ("float16", "float32")),
    *(Rows(2, size, residual=size % 2 == 0, config=1) for size in (256, 383, 1024)),
    *(Rows(2, size, residual=size % 2 == 0) for size in (8191, 8192, 8193, 20000)),
    Rows(0, 64),
    Rows(5, 80, heads=3, weighted=False),
    Rows(2, 383, residual=True, weighted=False, config=1),
    Rows(2, 64, eps=3.0),
]  # fmt: skip


def normalise_here(rows: Rows) -> None:
    normalise(nnfront_kernels, rows)


@pytest.mark.parametrize("rows", few_of(CASES, 3), ids=str)
def test_rms_norm_matches_float64(interpreted, rows):
    interpreted(normalise_here, rows)


def in_place(size: int) -> None:
    x, residual, weight = torch.randn(3, size), torch.randn(3, size), torch.randn(size)
    expected = rms_norm.launch(x, weight, eps=1e-5, residual=residual.clone())
    s, y = rms_norm.launch(x, weight, eps=1e-5, residual=residual, total=residual, out=x)
    assert s is residual
    assert torch.equal(s, expected[0])
    assert torch.equal(y, expected[1])


@pytest.mark.parametrize("size", [100, 9000])
def test_sum_and_norm_may_replace_the_operands(interpreted, size):
    interpreted(in_place, size)


HERE = Rows(17, 65, heads=3, residual=True, gap=3, eps=0.5)
LONG = Rows(3, 300, residual=True, eps=0.5, config=1)
MUTANTS = [
    (Mutant("eps_dropped", "rms_norm.py", "squares = tl.sum(s * s, axis=1)\n        inverse = 1.0 / tl.sqrt_rn(squares / SIZE + eps)", "squares = tl.sum(s * s, axis=1)\n        inverse = 1.0 / tl.sqrt_rn(squares / SIZE)"), HERE),
    (Mutant("mean_over_the_block", "rms_norm.py", "squares = tl.sum(s * s, axis=1)\n        inverse = 1.0 / tl.sqrt_rn(squares / SIZE", "squares = tl.sum(s * s, axis=1)\n        inverse = 1.0 / tl.sqrt_rn(squares / BLOCK_N"), HERE),
    (Mutant("weight_left_out", "rms_norm.py", "y = y * tl.load(w_ptr", "y = y + 0 * tl.load(w_ptr"), HERE),
    (Mutant("norm_of_the_unrounded_sum", "rms_norm.py", "s = added.to(x.dtype).to(tl.float32)", "s = added"), replace(HERE, tokens=257)),
    (Mutant("residual_not_added", "rms_norm.py", "added = s + tl.load(residual_rows", "added = s + 0 * tl.load(residual_rows"), HERE),
    (Mutant("heads_of_x_ignored", "rms_norm.py", "token * stride_xt + head * stride_xh", "token * stride_xt"), HERE),
    (Mutant("one_row_too_many", "rms_norm.py", "row < ROWS", "row <= ROWS"), replace(HERE, gap=16)),
    (Mutant("one_column_too_many", "rms_norm.py", "inside_n = at < SIZE\n", "inside_n = at <= SIZE\n"), HERE),
    (Mutant("last_step_of_squares_lost", "rms_norm.py", "partial += s * s", "partial = s * s"), LONG),
    (Mutant("steps_written_on_the_first", "rms_norm.py", "w_ptr, b_ptr, first + at, inside_n", "w_ptr, b_ptr, at, inside_n"), LONG),
]  # fmt: skip


def run_mutant(mutant: Mutant, rows: Rows) -> None:
    normalise(package(mutant), rows)


@pytest.mark.parametrize(("mutant", "rows"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_the_norm_is_caught(interpreted, mutant, rows):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, rows)


@pytest.mark.parametrize("rows", [HERE, replace(HERE, tokens=257), LONG], ids=str)
@pytest.mark.matrix
def test_the_norm_without_the_mistake_passes(interpreted, rows):
    interpreted(run_mutant, Mutant("none", "", "", ""), rows)


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"x": tensor(8)}, r"x must be \[rows, size\] or \[tokens, heads, size\], got \[8\]"),
    ({"x": tensor(8, 4).T}, r"x must have adjacent elements along its last axis, got strides \[1, 4\]\n  help: x.contiguous"),
    ({"weight": tensor(4)}, r"weight must be a dense \[8\], got \[4\]"),
    ({"residual": tensor(4, 7)}, r"residual must be torch.float16 \[4, 8\], got torch.float16 \[4, 7\]"),
    ({"out": tensor(4, 8, dtype=torch.float32)}, r"out must be torch.float16 \[4, 8\], got torch.float32 \[4, 8\]"),
    ({"total": tensor(4, 8)}, "total is for the sum with a residual, and there is none"),
    ({"x": tensor(4, 0), "weight": tensor(0)}, "rms_norm: rows must have at least 1 element, got 0"),
    ({"x": tensor(4, 8, dtype=torch.int8)}, "rms_norm: dtype must be one of float16, bfloat16, float32, got 'int8'"),
    ({"x": tensor(2**31, 8)}, r"rms_norm: there must be less than 2\^31 rows, got 2147483648"),
    ({"arch": "sm_70"}, "rms_norm: arch must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[-30:] for _, message in WRONG])
def test_rms_norm_says_what_does_not_fit(changes, message):
    arguments = {"x": tensor(4, 8), "weight": tensor(8), "eps": 1e-6, "arch": "sm_90", **changes}
    with pytest.raises(KernelError, match=message):
        rms_norm.plan(arguments.pop("x"), arguments.pop("weight"), **arguments)
