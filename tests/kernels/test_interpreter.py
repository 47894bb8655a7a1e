# SPDX-License-Identifier: Apache-2.0
"""Every kernel against float64, run by Triton's interpreter on shapes around the edges of a tile."""

from __future__ import annotations

import nnfront_kernels
import pytest
from few_of import few_of
from kernel_cases import (
    EPILOGUES,
    LAYOUTS,
    MATMULS,
    OPERANDS,
    QUANTIZED,
    SIZES,
    SPLIT,
    Case,
    grid,
    pairwise,
    run,
)


def run_one_of_three_again(name: str, case: Case) -> None:
    run(nnfront_kernels, name, case, launches=1 if case.config % 3 else 2)


def cases(kernel: nnfront_kernels.Kernel, shapes: list[tuple[int, int, int]]) -> list[object]:
    made = []
    for index, (m, n, k) in enumerate(shapes):
        quantized: dict[str, object] = {}
        if kernel.name in QUANTIZED:
            group = kernel.groups[(index + index // 6) % len(kernel.groups)]
            if kernel.name == "matmul_fp8":
                k = 16 * (1 + 2 * SIZES.index(k))  # a block of K need not be full
            else:
                k = group * (1 + SIZES.index(k) % 4) if group else 16 * (1 + SIZES.index(k))
            quantized = {
                "group": group,
                "zero_points": kernel.name == "matmul_int4" and index * 5 // 7 % 2 == 1,
            }
        if m > SPLIT.get(kernel.name, m):
            m = SIZES[SIZES.index(m) - 5]  # still every pair of N and K
        dtypes = [
            dtype for dtype in kernel.dtypes if dtype != "bfloat16"
        ]  # the interpreter's bfloat16 is wrong
        case = Case(
            m, n, k, dtype=dtypes[index % len(dtypes)], config=index, **EPILOGUES[index % 7], **LAYOUTS[index % 5], **quantized
        )  # fmt: skip
        made.append(pytest.param(kernel.name, case, id=f"{kernel.name}-{case}"))
    return made


# By default not every size meets every other one; quantised kernels have their own K, and interpret slowly.
SOME = (1, 2, 15, 16, 17, 64, 65, 129, 257)
FEWER = (1, 15, 17, 64, 129, 257)


def default_shapes(kernel: nnfront_kernels.Kernel) -> list[tuple[int, int, int]]:
    return pairwise(FEWER if kernel.name in QUANTIZED else SOME)


@pytest.mark.parametrize(
    ("name", "case"), [c for k in MATMULS for c in few_of(cases(k, default_shapes(k)), 2)]
)
def test_kernel_matches_float64(interpreted, name, case):
    interpreted(run_one_of_three_again, name, case)


def run_rows(name: str, m: int) -> None:
    """All sizes of N and K with so many rows, or fewer where the kernel takes no more."""
    kernel, shapes = next(kernel for kernel in MATMULS if kernel.name == name), grid(SIZES)
    for shape, param in zip(shapes, cases(kernel, shapes), strict=True):
        if shape[0] == m:
            try:
                run(nnfront_kernels, *param.values)
            except Exception as error:
                error.add_note(param.id)
                raise


@pytest.mark.slow
@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("name", [kernel.name for kernel in MATMULS])
def test_kernel_matches_float64_on_the_full_grid(interpreted, name, m):
    interpreted(run_rows, name, m)


def test_every_kernel_has_weights_to_test_with():
    assert set(OPERANDS) == {kernel.name for kernel in MATMULS}
