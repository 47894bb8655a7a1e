# SPDX-License-Identifier: Apache-2.0
"""The assembly that unpacks nibbles exchanges bytes 1 and 2 of a word: right only if its four bytes are neighbours along K."""

from __future__ import annotations

import re
from types import ModuleType

import nnfront_kernels
import pytest
from kernel_budgets import Build, builds
from kernel_mutants import Mutant, package
from nnfront_kernels import matmul_int4
from nnfront_kernels.ahead import compile_plan
from nnfront_kernels.inspect import plan_for

BUILDS = [build for build in builds(matmul_int4.KERNEL) if not build.shape.gated and not build.wide]
# Tiles for the tensor cores of a warp and of four, and a group that is smaller than what a warp loads.
PLAIN = [b for b in BUILDS if b.arch == "sm_90" and b.shape.group in (32, 128)]
FEW = [
    b for b in PLAIN if (b.shape.group, b.config.block_m) in ((128, 64), (32, 16))
]  # with and without zero points


def neighbours_along_k(ttgir: str) -> list[int]:
    """How many neighbours along K a thread has in a row in the operand [K, N] of each piece of assembly; 0 for a layout not known here."""
    found = []
    unpacked = r"elementwise_inline_asm .* -> tensor<[^#]*(#.*?)>(?:, tensor| loc|$)"  # as the operands are
    for layout in re.findall(unpacked, ttgir, re.MULTILINE):
        operand = re.search(r"#ttg\.dot_op<\{opIdx = 1, parent = #\w+, kWidth = (\d+)\}>", layout)
        if operand:
            found.append(int(operand[1]))
            continue
        found_layout = re.search(rf"^{layout} = #ttg\.blocked<(.*)>$", ttgir, re.MULTILINE)
        blocked = found_layout and re.search(
            r"sizePerThread = \[(\d+), \d+\].* order = \[0, 1\]", found_layout[1]
        )
        found.append(int(blocked[1]) if blocked else 0)
    return found


def words_of(build: Build, kernels: ModuleType = nnfront_kernels) -> list[int]:
    kernel = kernels.matmul_int4.KERNEL
    plan = plan_for(kernel, build.shape, build.dtype, build.arch, build.config)
    return neighbours_along_k(compile_plan(plan, build.arch).asm["ttgir"])


@pytest.mark.parametrize(
    "build", [pytest.param(b, marks=() if b in FEW else pytest.mark.matrix) for b in BUILDS], ids=str
)
def test_the_assembly_gets_four_neighbours_along_k(compiled, build):
    found = compiled(words_of, build)
    assert found
    assert all(count >= 4 and count % 4 == 0 for count in found)


def words_along_n(mutant: Mutant, build: Build) -> list[int]:
    return words_of(build, package(mutant))


def test_weights_whose_neighbours_are_along_n_are_found(compiled):
    """The mistake compiles: only the layout shows it."""
    old = "w_ptr + (offs_n.to(tl.int64) * stride_wn)[None, :] + offs_k[:, None]"
    new = "w_ptr + offs_n[None, :] + (offs_k.to(tl.int64) * stride_wn)[:, None]"
    build = next(b for b in FEW if b.config.block_m == 64)
    assert compiled(words_along_n, Mutant("along_n", "matmul_int4.py", old, new), build) == [0]


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        ("#ttg.dot_op<{opIdx = 1, parent = #mma, kWidth = 2}>", 2),
        ("#ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 4}>", 0),
        ("#a", 8),
        ("#b", 0),
        ("#c", 0),
    ],
)
def test_layouts_are_read_from_the_compilers_text(layout, count):
    text = (
        "#a = #ttg.blocked<{sizePerThread = [8, 1], threadsPerWarp = [4, 8], warpsPerCTA = [1, 4], order = [0, 1]}>\n"
        "#b = #ttg.blocked<{sizePerThread = [8, 1], threadsPerWarp = [4, 8], warpsPerCTA = [1, 4], order = [1, 0]}>\n"
        "#c = #ttg.linear<{register = [[0, 1], [1, 0]]}>\n"
        f'%1:2 = tt.elementwise_inline_asm "shr" {{pure = true}} %0 : tensor<64x128xi8, {layout}> -> tensor<64x128xbf16, {layout}>\n'
    )
    assert neighbours_along_k(text) == [count]
