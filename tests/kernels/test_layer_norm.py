# SPDX-License-Identifier: Apache-2.0
"""Layer norms of rows against float64: sizes around a block, large means, long rows, heads, and mistakes that must show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_checks import EPS32, Guarded, assert_close, surrounded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, layer_norm
from nnfront_kernels.rms_norm import CONFIGS


@dataclass(frozen=True)
class Rows:
    """tokens x heads rows; heads 0 is a matrix. `mean` is what all values of a row are near to, in deviations."""

    tokens: int
    size: int
    heads: int = 0
    dtype: str = "float32"
    weight: bool = True
    bias: bool = True
    residual: bool = False
    mean: float = 0.0
    gap: int = 0
    offset: int = 0
    eps: float = 1e-5
    config: int | None = None

    def __str__(self) -> str:
        flags = [name for name in ("weight", "bias", "residual") if getattr(self, name)]
        return (
            f"{self.tokens}x{self.heads}x{self.size}-{self.dtype}-mean{self.mean:g}-gap{self.gap}-config{self.config}-"
            + "-".join(flags)
        )


def normalise(package: ModuleType, rows: Rows) -> None:
    """Launch twice on poisoned outputs; AssertionError unless sums and norms are right."""
    generator = torch.Generator().manual_seed(rows.tokens * 1000 + rows.size)
    dtype = getattr(torch, rows.dtype)
    count = rows.tokens * max(rows.heads, 1)

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (rows.tokens, rows.heads)) if rows.heads else tensor

    def values() -> torch.Tensor:
        away = torch.randn(count, rows.size, generator=generator, dtype=torch.float64)
        return shaped(surrounded((rows.mean + away).to(dtype), rows.gap, rows.offset))

    x, residual = values(), values() if rows.residual else None
    vector = lambda: torch.randn(rows.size, generator=generator).to(  # noqa: E731
        torch.float32 if rows.gap else dtype
    )
    weight, bias = vector() if rows.weight else None, vector() if rows.bias else None
    options = {"eps": rows.eps, "residual": residual}
    config = None if rows.config is None else CONFIGS[rows.config]
    got = launched_twice(
        lambda pattern: [
            Guarded(count, rows.size, dtype, rows.gap, rows.offset, pattern)
            for _ in range(1 + rows.residual)
        ],
        lambda views: package.layer_norm.plan(
            x, weight, bias, **options, out=shaped(views[0]), total=shaped(views[1]) if rows.residual else None, arch="sm_80", config=config
        ),
    )  # fmt: skip
    s = x.reshape(count, rows.size).double()
    if residual is not None:
        exact = s + residual.reshape(count, rows.size).double()
        assert_close(actual=got[1], expected=exact, drift=EPS32 * exact.abs())
        s = got[1].double()
    expected, drift = answer(s, weight, bias, rows.eps)
    assert_close(actual=got[0], expected=expected, drift=drift)
    stated = package.layer_norm.reference(x, weight, bias, **options, compute=torch.float64)
    stated = stated if residual is None else stated[1]
    assert_close(actual=stated.reshape(count, rows.size), expected=expected, drift=drift)


def answer(
    s: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of float64 rows, and how far float32 may drift: differences from the mean lose what the mean has too many."""
    size = s.shape[1]
    away = s - s.sum(1, keepdim=True) / size
    deviation = ((away * away).sum(1, keepdim=True) / size + eps) ** 0.5
    w = 1.0 if weight is None else weight.double()
    y = away / deviation * w
    mean_error = 4 * EPS32 * (s.abs().sum(1, keepdim=True) / size)
    drift = (mean_error + EPS32 * s.abs()) / deviation * (w if weight is None else w.abs())
    drift = drift + y.abs() * (8 * EPS32 + (mean_error / deviation) ** 2)
    y = y if bias is None else y + bias.double()
    return y, drift + 2 * EPS32 * y.abs()


SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257)
CASES = [
    *(
        Rows(
            SIZES[(5 * i + 3) % 12] if i % 5 in (1, 2) else 1 + i, size, dtype=("float16", "float32")[i % 2], residual=i % 3 == 1,
            weight=i % 4 != 1, bias=i % 4 > 1, gap=(0, 16, 3)[i % 3], offset=i % 2, config=i % 5,
        )
        for i, size in enumerate(SIZES)
    ),
    *(Rows(t, size, heads=h, gap=g, dtype="float16") for t, h, size, g in ((5, 3, 64, 0), (3, 7, 80, 5), (2, 4, 256, 0))),
    *(Rows(3, size, residual=True, gap=7, mean=300.0) for size in (2047, 4096)),
    *(Rows(2, size, residual=size % 2 == 0, mean=1000.0) for size in (64, 8191, 8193, 20000)),
    Rows(0, 64),
    Rows(2, 64, eps=3.0),
]  # fmt: skip


def normalise_here(rows: Rows) -> None:
    normalise(nnfront_kernels, rows)


@pytest.mark.parametrize("rows", few_of(CASES, 3), ids=str)
def test_layer_norm_matches_float64(interpreted, rows):
    interpreted(normalise_here, rows)


def constant_rows() -> torch.Tensor:
    return layer_norm.launch(torch.full((2, 100), 7.25), bias=torch.arange(100.0), eps=1e-5)


def test_a_row_of_equal_values_becomes_the_bias(interpreted):
    assert torch.equal(interpreted(constant_rows), torch.arange(100.0).expand(2, 100))


def in_place(size: int) -> None:
    x, residual, weight = torch.randn(3, size), torch.randn(3, size), torch.randn(size)
    expected = layer_norm.launch(x, weight, eps=1e-5, residual=residual.clone())
    s, y = layer_norm.launch(x, weight, eps=1e-5, residual=residual, total=residual, out=x)
    assert s is residual
    assert torch.equal(s, expected[0])
    assert torch.equal(y, expected[1])


@pytest.mark.parametrize("size", [100, 9000])
def test_sum_and_norm_may_replace_the_operands(interpreted, size):
    interpreted(in_place, size)


HERE = Rows(17, 65, heads=3, residual=True, gap=3, eps=0.5, mean=2.0)
OFFSET = Rows(3, 300, mean=1000.0)
# Long: rows of 20000 are three steps of the widest config.
LONG = Rows(2, 20000, eps=0.5, mean=50.0)
MUTANTS = [
    (Mutant("eps_dropped", "rms_norm.py", "squares = tl.sum(s * s, axis=1)\n        inverse = 1.0 / tl.sqrt_rn(squares / SIZE + eps)", "squares = tl.sum(s * s, axis=1)\n        inverse = 1.0 / tl.sqrt_rn(squares / SIZE)"), HERE),
    (Mutant("mean_over_the_block", "rms_norm.py", "mean = tl.sum(s, axis=1) / count", "mean = tl.sum(s, axis=1) / s.shape[1]"), HERE),
    (Mutant("columns_outside_counted", "rms_norm.py", "tl.where(inside_n[None, :], s - mean[:, None], 0.0)", "s - mean[:, None]"), HERE),
    (Mutant("mean_not_subtracted", "rms_norm.py", "(s - mean[:, None] if CENTERED else s)", "s"), HERE),
    (Mutant("variance_by_squares", "rms_norm.py", "return mean, tl.sum(away * away, axis=1)", "return mean, tl.sum(s * s, axis=1) - mean * mean * count"), OFFSET),
    (Mutant("weight_dropped", "rms_norm.py", "if w_ptr is not None:", "if False:"), HERE),
    (Mutant("bias_dropped", "rms_norm.py", "if b_ptr is not None:", "if False:"), HERE),
    (Mutant("heads_of_x_ignored", "rms_norm.py", "token * stride_xt + head * stride_xh", "token * stride_xt"), HERE),
    (Mutant("one_row_too_many", "rms_norm.py", "row < ROWS", "row <= ROWS"), replace(HERE, gap=16)),
    (Mutant("steps_not_joined", "rms_norm.py", "squares += part_squares + away * away * (first * share)", "squares += part_squares"), replace(LONG, eps=1e-5, mean=0.0)),
    (Mutant("last_part_counts_as_a_whole_one", "rms_norm.py", "tl.minimum(SIZE - first, BLOCK_N)", "tl.minimum(SIZE, BLOCK_N)"), LONG),
    (Mutant("mean_of_the_last_part", "rms_norm.py", "mean += away * share", "mean = part_mean"), LONG),
    (Mutant("steps_written_on_the_first", "rms_norm.py", "w_ptr, b_ptr, first + at, inside_n", "w_ptr, b_ptr, at, inside_n"), LONG),
]  # fmt: skip


def run_mutant(mutant: Mutant, rows: Rows) -> None:
    normalise(package(mutant), rows)


@pytest.mark.parametrize(("mutant", "rows"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_the_layer_norm_is_caught(interpreted, mutant, rows):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, rows)


@pytest.mark.parametrize("rows", sorted({rows for _, rows in MUTANTS}, key=str), ids=str)
@pytest.mark.matrix
def test_the_layer_norm_without_the_mistake_passes(interpreted, rows):
    interpreted(run_mutant, Mutant("none", "", "", ""), rows)


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"x": tensor(8)}, r"x must be \[rows, size\] or \[tokens, heads, size\], got \[8\]"),
    ({"weight": tensor(4)}, r"weight must be a dense \[8\], got \[4\]"),
    ({"bias": tensor(16)[::2]}, r"bias must be a dense \[8\], got \[8\] with strides \[2\]"),
    ({"residual": tensor(4, 7)}, r"residual must be torch.float16 \[4, 8\], got torch.float16 \[4, 7\]"),
    ({"total": tensor(4, 8)}, "total is for the sum with a residual, and there is none"),
    ({"x": tensor(4, 0)}, "layer_norm: rows must have at least 1 element, got 0"),
    ({"x": tensor(4, 8, dtype=torch.int8)}, "layer_norm: dtype must be one of float16, bfloat16, float32, got 'int8'"),
    ({"arch": "sm_70"}, "layer_norm: arch must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[-30:] for _, message in WRONG])
def test_layer_norm_says_what_does_not_fit(changes, message):
    arguments = {"x": tensor(4, 8), "weight": None, "bias": None, "eps": 1e-6, "arch": "sm_90", **changes}
    with pytest.raises(KernelError, match=message):
        layer_norm.plan(arguments.pop("x"), arguments.pop("weight"), arguments.pop("bias"), **arguments)
