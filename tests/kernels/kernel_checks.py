# SPDX-License-Identifier: Apache-2.0
"""What it means that a kernel's output is right: error bounds, poisoned buffers, guard bands.

A norm over the whole output hides a wrong tail tile, so every element has a bound of its own and every 16 x 16 block a
tighter one on its root mean square.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """`unit` is half the distance between neighbours in a dtype, relative; `smallest` the same near zero, absolute."""

    unit: float
    smallest: float


TOLERANCES = {
    torch.float16: Tolerance(2.0**-11, 2.0**-25),
    torch.bfloat16: Tolerance(2.0**-8, 2.0**-134),
    torch.float32: Tolerance(2.0**-24, 2.0**-150),
}
# Root mean square of error / bound in a block. Rounding to nearest gives 1 / sqrt(3) = 0.58 of half the distance, which
# is itself between a half and one unit of the value: 0.42 in all. Truncation would give 0.84.
ROUGH = 0.6
EPS32 = 2.0**-23
SUM = 4.0  # times eps32 * sqrt(K) * |x| @ |w|.T: how far float32 sums in any order may drift
GUARD = 64  # elements on either side of a buffer


# Bits of the mantissa that a sum of float8 products has within 128 of K, where Hopper's tensor cores add them up.
HOPPER_BITS = 13


def hopper_drift(kernel: str, arch: str, block_m: int) -> float:
    """How far a sum may be off besides, relative to the sum of its terms' magnitudes: tiles of fewer rows are multiplied as float16."""
    is_short = kernel.startswith("matmul_fp8") and arch == "sm_90" and block_m >= 64
    return 4 * 2.0**-HOPPER_BITS if is_short else 0.0


class Guarded:
    """A [rows, columns] output inside a larger buffer of one bit pattern; `check` sees any write outside it."""

    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, gap: int, offset: int, pattern: int
    ) -> None:
        self.stride = columns + gap
        self.start = GUARD + offset
        size = self.start + rows * self.stride + GUARD
        self.buffer = torch.full((size * dtype.itemsize,), pattern, dtype=torch.uint8).view(dtype)
        self.view = self.buffer.as_strided((rows, columns), (self.stride, 1), self.start)
        self.pattern = pattern

    def check(self) -> None:
        """Raise AssertionError if an element outside the view changed."""
        outside = torch.ones(self.buffer.numel(), dtype=torch.bool)
        outside.as_strided(self.view.shape, self.view.stride(), self.start).fill_(False)
        untouched = self.buffer.view(torch.uint8).view(self.buffer.numel(), -1) == self.pattern
        changed = (outside & ~untouched.all(1)).nonzero().flatten() - self.start
        assert not changed.numel(), (
            f"{changed.numel()} elements outside the output changed, first at {int(changed[0])}"
        )


def surrounded(values: torch.Tensor, gap: int, offset: int) -> torch.Tensor:
    """The same matrix as a strided view into a buffer that is NaN (or 0x55 for integers) everywhere else."""
    rows, columns = values.shape
    size = GUARD + offset + rows * (columns + gap) + GUARD
    fill = float("nan") if values.is_floating_point() else 0x55
    view = torch.full((size,), fill, dtype=values.dtype).as_strided(
        (rows, columns), (columns + gap, 1), GUARD + offset
    )
    return view.copy_(values)


def assert_close(*, actual: torch.Tensor, expected: torch.Tensor, drift: torch.Tensor) -> None:
    """Raise AssertionError unless `actual` is the rounding of something within `drift` of `expected` (float64)."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    tolerance = TOLERANCES[actual.dtype]
    error = (actual.double() - expected).abs()
    bound = drift * (1 + tolerance.unit) + expected.abs() * tolerance.unit + tolerance.smallest
    wrong = ~(error <= bound)  # a NaN is wrong
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements are off, first at {at}: "
            f"got {float(actual[at])}, expected {float(expected[at])} within {float(bound[at]):.3g}"
        )
    rough = _block_means((error / bound) ** 2).sqrt() > ROUGH
    assert not rough.any(), (
        f"16 x 16 blocks {rough.nonzero().tolist()} are off by more than {ROUGH} of their bound"
    )


def _block_means(values: torch.Tensor) -> torch.Tensor:
    """Means over the full 16 x 16 blocks of a matrix; smaller ones at the edge have too few elements to average."""
    rows, columns = (size // 16 for size in values.shape)
    blocks = values[: rows * 16, : columns * 16].reshape(rows, 16, columns, 16)
    return blocks.mean(dim=(1, 3))
