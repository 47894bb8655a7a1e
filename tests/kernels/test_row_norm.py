# SPDX-License-Identifier: Apache-2.0
"""Products that divide the rows of x by their root mean square: against float64, in the interpreter and with mistakes in them."""

from __future__ import annotations

from dataclasses import replace

import nnfront_kernels
import pytest
import torch
from kernel_cases import Case, run
from kernel_mutants import Mutant, package
from nnfront_kernels.common import KernelError
from nnfront_kernels.row_norm import normalised
from nnfront_kernels.split_k import needed

# Config 3 has one block for a tile, 1 two and 2 three.
DENSE = Case(15, 63, 257, norm=True, bias=True, activation="silu", config=1)
ROW = Case(1, 63, 1030, norm=True, residual=True, config=8)
INT4 = Case(15, 65, 192, group=32, zero_points=True, norm=True, gated=True, activation="silu", config=1)
INT8 = Case(15, 64, 192, group=0, norm=True, scale=0.5, config=2)
CASES = [
    ("matmul_small_m", DENSE),
    ("matmul_small_m", ROW),
    ("matmul_small_m", replace(ROW, config=4, gated=True, residual=False, activation="silu")),
    ("matmul_small_m", replace(DENSE, m=16, n=129, k=512, config=3)),
    ("matmul_small_m", replace(DENSE, m=2, gap=3)),
    ("matmul_int4", INT4),
    ("matmul_int4", replace(INT4, m=1, zero_points=False, group=128, k=256, config=0)),
    ("matmul_int8", INT8),
    ("matmul_int8", replace(INT8, group=32, m=16, config=1, bias=True)),
]


def run_here(name: str, case: Case) -> None:
    run(nnfront_kernels, name, case)


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case}" for name, case in CASES])
def test_rows_are_normalised_inside_of_the_product(interpreted, name, case):
    interpreted(run_here, name, case)


MUTANTS = [
    (Mutant("eps_dropped", "row_norm.py", "squares / K + eps", "squares / K"), "matmul_small_m", DENSE),
    (Mutant("mean_of_a_part", "row_norm.py", "squares / K", "squares / (K + 1)"), "matmul_small_m", replace(DENSE, k=16)),
    (Mutant("no_root", "row_norm.py", "tl.sqrt_rn(squares / K + eps)", "(squares / K + eps)"), "matmul_small_m", DENSE),
    (Mutant("squares_of_one_split", "split_k.py", "squares += tl.load(rows", "squares = tl.load(rows"), "matmul_small_m", DENSE),
    (Mutant("squares_where_sums_are", "split_k.py", "num_splits * SIZE + BLOCK_M * BLOCK_N + tl.arange(0, BLOCK_M)\n        tl.store", "num_splits * SIZE + tl.arange(0, BLOCK_M)\n        tl.store"), "matmul_small_m", DENSE),
    (Mutant("half_a_group", "matmul_int4.py", "add_squares(add_squares(squares, x_first), x_second)", "add_squares(squares, x_first)"), "matmul_int4", INT4),
    (Mutant("bytes_not_normalised", "matmul_int8.py", "acc = divided(acc, squares, K, norm_eps)", "acc = acc"), "matmul_int8", INT8),
]  # fmt: skip


def run_mutant(mutant: Mutant, name: str, case: Case) -> None:
    run(package(mutant), name, case)


@pytest.mark.parametrize(("mutant", "name", "case"), MUTANTS, ids=[str(mutant) for mutant, _, _ in MUTANTS])
def test_mistakes_in_the_norm_are_found(interpreted, mutant, name, case):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, name, case)


def test_the_definition_is_the_norm_of_torch():
    x = torch.randn(3, 40, dtype=torch.float64)
    assert torch.allclose(normalised(x, 1e-3), torch.nn.functional.rms_norm(x, (40,), eps=1e-3))
    assert normalised(x, None) is x


def test_a_part_of_a_tile_has_room_for_squares_and_begins_at_16_bytes():
    config = nnfront_kernels.Config(1, 8, 1024, 4, 2, split_k=2)
    plain, more = needed(config, 1, 8), needed(config, 1, 8, squares=True)
    assert (plain.partial, more.partial) == (16, 48)
    assert more.partial // 2 % 4 == 0


def test_many_rows_are_not_normalised():
    x, w = torch.empty(17, 32, device="meta"), torch.empty(16, 32, device="meta")
    for module, weights in (
        (nnfront_kernels.matmul_int8, (w.to(torch.int8), torch.empty(1, 16, device="meta"))),
        (nnfront_kernels.matmul_int4, (w[:, :16].to(torch.uint8).contiguous(), w[:1, :16])),
    ):
        with pytest.raises(
            KernelError, match="rows are normalised in products of at most 16 of them, got 17"
        ):
            module.plan(x.bfloat16(), *weights, arch="sm_90", norm_eps=1e-5)


def test_what_does_not_normalise_says_so():
    for module in (nnfront_kernels.matmul, nnfront_kernels.matmul_fp8):
        shape = replace(module.KERNEL.typical, norm=True)
        assert module.accepts(shape, module.KERNEL.dtypes[0], "sm_90") == "it does not normalise rows"
