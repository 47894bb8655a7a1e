# SPDX-License-Identifier: Apache-2.0
"""Each deliberate mistake is found by the checks that the real kernels pass."""

from __future__ import annotations

import pytest
from kernel_cases import Case, run
from kernel_mutants import Mutant, package

FULL = Case(65, 63, 33, bias=True, residual=True, gap=3, activation="silu", scale=0.5)
GATED = Case(17, 33, 16, gated=True, activation="gelu")

TMA = Case(65, 129, 33, bias=True, residual=True, gap=3, activation="silu", scale=0.5, config=3)

MUTANTS = [
    (Mutant("right_half_stored_left", "matmul_tma.py", "store_half(right, y_desc, residual_desc, first_m, first_n + HALF)", "store_half(right, y_desc, residual_desc, first_m, first_n)"), "matmul_tma", TMA),
    (Mutant("tma_bias_of_the_left_half", "matmul_tma.py", "finish_tile(right, bias_ptr, scale, first_n + HALF", "finish_tile(right, bias_ptr, scale, first_n"), "matmul_tma", TMA),
    (Mutant("tma_residual_dropped", "matmul_tma.py", "half += residual_desc", "half += 0 * residual_desc"), "matmul_tma", TMA),
    (Mutant("tma_tiles_skipped", "matmul_tma.py", "num_m * num_n, tl.num_programs(0)", "num_m * num_n, tl.num_programs(0) + 1"), "matmul_tma", Case(257, 257, 16, config=4)),
    (Mutant("store_mask_one_row_too_many", "epilogue.py", "(offs_m < M)", "(offs_m <= M)"), "matmul", FULL),
    (Mutant("store_mask_one_column_too_many", "epilogue.py", "(offs_c < num_columns)", "(offs_c <= num_columns)"), "matmul", FULL),
    (Mutant("store_mask_one_row_too_few", "epilogue.py", "(offs_m < M)", "(offs_m < M - 1)"), "matmul", FULL),
    (Mutant("k_mask_off_by_one", "matmul.py", "(offs_k < K - k)", "(offs_k <= K - k)"), "matmul", FULL),
    (Mutant("k_mask_missing", "matmul.py", 'k % config.block_k == 0', "True"), "matmul", FULL),
    (Mutant("rows_of_w_unmasked", "matmul.py", "inside_n = (offs_n < N)[:, None]", "inside_n = (offs_n < N + 9)[:, None]"), "matmul", Case(1, 1, 16, bias=True)),
    (Mutant("w_stride_ignored", "matmul.py", "offs_n.to(tl.int64) * stride_wn", "offs_n.to(tl.int64) * K"), "matmul", FULL),
    (Mutant("scale_dropped", "epilogue.py", "acc = acc * scale", "acc = acc"), "matmul", FULL),
    (Mutant("bias_scaled", "epilogue.py", ".to(tl.float32)[None, :]\n    if", ".to(tl.float32)[None, :] * scale\n    if"), "matmul", FULL),
    (Mutant("gate_and_up_swapped", "epilogue.py", "gate, up = tl.split", "up, gate = tl.split"), "matmul", GATED),
    (Mutant("residual_dropped", "epilogue.py", "tile += tl.load(", "tile = tile + 0 * tl.load("), "matmul", FULL),
    (Mutant("tile_rows_skipped", "matmul.py", "cdiv(m, config.block_m) * cdiv(n", "(m // config.block_m) * cdiv(n"), "matmul", FULL),
    (Mutant("sums_in_16_bits", "matmul.py", "acc = tl.dot(x, w.T, acc, input_precision=\"ieee\")", "acc = tl.dot(x, w.T, acc, input_precision=\"ieee\").to(tl.float16).to(tl.float32)"), "matmul", Case(64, 64, 257)),
]  # fmt: skip


def run_mutant(mutant: Mutant, name: str, case: Case) -> None:
    run(package(mutant), name, case)


@pytest.mark.ahead.with_args(run_mutant)
@pytest.mark.parametrize(("mutant", "name", "case"), MUTANTS, ids=[str(mutant) for mutant, _, _ in MUTANTS])
def test_mutant_is_caught(interpreted, mutant, name, case):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, name, case)


@pytest.mark.parametrize(
    ("name", "case"), sorted({(name, case) for _, name, case in MUTANTS}, key=str), ids=str
)
def test_the_kernel_without_the_mistake_passes(interpreted, name, case):
    interpreted(run_mutant, Mutant("none", "", "", ""), name, case)
