# SPDX-License-Identifier: Apache-2.0
"""Every kernel against float64, run by Triton's interpreter on shapes around the edges of a tile."""

from __future__ import annotations

import nnfront_kernels
import pytest
from kernel_cases import EPILOGUES, LAYOUTS, SIZES, WEIGHTS, Case, grid, pairwise, run


def run_here(name: str, case: Case) -> None:
    run(nnfront_kernels, name, case)


def cases(kernel: nnfront_kernels.Kernel, shapes: list[tuple[int, int, int]]) -> list[object]:
    made = []
    for index, (m, n, k) in enumerate(shapes):
        dtypes = [
            dtype for dtype in kernel.dtypes if dtype != "bfloat16"
        ]  # the interpreter's bfloat16 is wrong
        case = Case(
            m, n, k, dtype=dtypes[index % len(dtypes)], config=index, **EPILOGUES[index % 7], **LAYOUTS[index % 5]
        )  # fmt: skip
        made.append(pytest.param(kernel.name, case, id=f"{kernel.name}-{case}"))
    return made


@pytest.mark.ahead.with_args(run_here)
@pytest.mark.parametrize(
    ("name", "case"), [c for k in nnfront_kernels.KERNELS for c in cases(k, pairwise(SIZES))]
)
def test_kernel_matches_float64(interpreted, name, case):
    interpreted(run_here, name, case)


@pytest.mark.slow
@pytest.mark.ahead.with_args(run_here)
@pytest.mark.parametrize(
    ("name", "case"), [c for k in nnfront_kernels.KERNELS for c in cases(k, grid(SIZES))]
)
def test_kernel_matches_float64_on_the_full_grid(interpreted, name, case):
    interpreted(run_here, name, case)


def test_every_kernel_has_weights_to_test_with():
    assert set(WEIGHTS) == {kernel.name for kernel in nnfront_kernels.KERNELS}
