# SPDX-License-Identifier: Apache-2.0
"""Each deliberate mistake is found by the checks that the real kernels pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kernel_cases import Case, run
from kernel_mutants import Mutant, package

FULL = Case(65, 63, 33, bias=True, residual=True, gap=3, activation="silu", scale=0.5)
GATED = Case(17, 33, 16, gated=True, activation="gelu")

TMA = Case(65, 129, 33, bias=True, residual=True, gap=3, activation="silu", scale=0.5, config=3)

SPLIT = Case(
    17, 63, 257, out_dtype="float32", bias=True, residual=True, gap=3, activation="silu", scale=0.5, config=5
)  # three splits
ROW = Case(1, 63, 1030, bias=True, config=4)  # two splits

INT4 = Case(17, 63, 384, group=64, zero_points=True, bias=True, gap=16, activation="silu", config=5)

INT8 = Case(17, 63, 192, group=64, bias=True, gap=16, activation="silu", config=6)
# Five tiles above one another, three beside one another.
INT8_TALL = Case(257, 129, 64, group=64, gap=16, config=2)
INT8_ROWS = Case(17, 63, 336, bias=True, gap=16, config=4)

FP8_ROWS = Case(
    17, 63, 336, "float8_e4m3fn", bias=True, gap=16, out_dtype="float32", config=2, scale=0.5
)  # decoded, three splits

MUTANTS = [
    (Mutant("fp8_row_scale_of_w_dropped", "matmul_fp8.py", "other=0.0)[:, None] * w_scales[None, :]", "other=0.0)[:, None]"), "matmul_fp8", FP8_ROWS),
    (Mutant("fp8_scale_of_the_first_row", "matmul_fp8.py", "x_scales_ptr + offs_m.to(tl.int64) * stride_xsm", "x_scales_ptr + offs_m.to(tl.int64) * 0"), "matmul_fp8", FP8_ROWS),
    (Mutant("fp8_whole_scale_read_as_rows", "matmul_fp8.py", "x_scales.stride(0) if x_scales.shape[0] > 1 else 0", "x_scales.stride(0)"), "matmul_fp8", replace(FP8_ROWS, n=64)),
    (Mutant("fp8_k_mask_missing", "matmul_fp8.py", "**depth(k, config)", "**depth(k, config), \"EVEN_K\": True"), "matmul_fp8", FP8_ROWS),
    (Mutant("fp8_exponent_off_by_one", "matmul_fp8.py", ") * 256.0", ") * 128.0"), "matmul_fp8", FP8_ROWS),
    (Mutant("fp8_sign_lost", "matmul_fp8.py", "((bits & 0x80) << 8) | ", ""), "matmul_fp8", FP8_ROWS),
    (Mutant("int8_group_scale_dropped", "matmul_int8.py", "tl.dot(x, w.to(x.dtype)) * scales.to(tl.float32)[None, :]", "tl.dot(x, w.to(x.dtype))"), "matmul_int8", INT8),
    (Mutant("int8_row_scale_dropped", "matmul_int8.py", "acc = acc * scales.to(tl.float32)[None, :]", "acc = acc"), "matmul_int8", INT8_ROWS),
    (Mutant("int8_scale_of_the_first_group", "matmul_int8.py", "scales = next_scales", "scales = scales"), "matmul_int8", INT8),
    (Mutant("int8_k_mask_missing", "matmul_int8.py", "**depth(k, config)", "**depth(k, config), \"EVEN_K\": True"), "matmul_int8", INT8_ROWS),
    (Mutant("int8_as_unsigned", "matmul_int8.py", "acc = tl.dot(x, w.to(x.dtype), acc)", "acc = tl.dot(x, w.to(tl.uint8, bitcast=True).to(x.dtype), acc)"), "matmul_int8", INT8_ROWS),
    (Mutant("tiles_in_no_order", "walk.py", "within // rows", "within % rows"), "matmul_int8", INT8_TALL),
    (Mutant("tiles_of_a_walk_summed_elsewhere", "split_k.py", "let_next_start(PDL)\n    pid_m, pid_n = tile_of_block(GROUP_M)", "let_next_start(PDL)\n    pid_m, pid_n = tile_of_block(1)"), "matmul_int8", INT8_TALL),
    (Mutant("nibbles_swapped", "matmul_int4.py", "low, high = unpack(", "high, low = unpack("), "matmul_int4", INT4),
    (Mutant("neighbours_not_exchanged", "nibbles.py", "tl.reshape(low, (HALF // 4, 2, 2, BLOCK_N)), (0, 2, 1, 3)", "tl.reshape(low, (HALF // 4, 2, 2, BLOCK_N)), (0, 1, 2, 3)"), "matmul_int4", INT4),
    (Mutant("group_scale_dropped", "matmul_int4.py", "product * scales.to(tl.float32)[None, :]", "product"), "matmul_int4", INT4),
    (Mutant("scale_of_the_first_group", "matmul_int4.py", "scales = next_scales", "scales = scales"), "matmul_int4", INT4),
    (Mutant("zero_point_sign", "nibbles.py", "zero = zeros.to(tl.int8)[None, :]", "zero = 16 - zeros.to(tl.int8)[None, :]"), "matmul_int4", INT4),
    (Mutant("zero_of_half_a_group", "nibbles.py", "high = ((w >> 4).to(tl.int8) - zero)", "high = ((w >> 4).to(tl.int8) - 8)"), "matmul_int4", INT4),
    (Mutant("zero_of_the_first_group", "matmul_int4.py", "            zeros = tl.load(zeros_ptrs + at * stride_zg", "            tl.load(zeros_ptrs + at * stride_zg"), "matmul_int4", INT4),
    (Mutant("second_half_of_x_unmoved", "matmul_int4.py", "x_ptrs + g * GROUP + HALF", "x_ptrs + g * GROUP"), "matmul_int4", INT4),
    (Mutant("last_group_skipped", "matmul_int4.py", "num_groups = K // GROUP", "num_groups = K // GROUP - 1"), "matmul_int4", INT4),
    (Mutant("count_not_reset", "split_k.py", "        tl.store(arrived_ptr + tile, 0)\n", ""), "matmul_small_m", SPLIT),
    (Mutant("sum_in_order_of_arrival", "split_k.py", "tl.load(tile_ptrs + s * SIZE", "tl.load(tile_ptrs + (split + s) % num_splits * SIZE"), "matmul_small_m", SPLIT),
    (Mutant("one_block_too_early", "split_k.py", "== num_splits - 1", "== num_splits - 2"), "matmul_small_m", SPLIT),
    (Mutant("one_split_left_out", "split_k.py", "range(0, num_splits):\n            #", "range(1, num_splits):\n            #"), "matmul_small_m", SPLIT),
    (Mutant("partial_sums_of_tiles_overlap", "split_k.py", "tile_ptrs = partial_ptr + tile.to(tl.int64) * num_splits * SIZE", "tile_ptrs = partial_ptr + tile.to(tl.int64) * SIZE"), "matmul_small_m", SPLIT),
    (Mutant("rows_that_are_not_there_are_summed", "split_k.py", "tl.store(tile_ptrs + split * SIZE, acc, mask=inside_m)", "tl.store(tile_ptrs + split * SIZE, acc)"), "matmul_small_m", SPLIT),
    (Mutant("split_reads_into_the_next", "split_k.py", "tl.minimum(first + depth, steps)", "tl.minimum(first + depth + 1, steps)"), "matmul_small_m", SPLIT),
    (Mutant("k_mask_of_a_single_row", "matmul_small_m.py", "in_x & (at < K)", "in_x"), "matmul_small_m", ROW),
    (Mutant("later_splits_forgotten", "split_k.py", "first = tl.program_id(2) * depth", "first = 0 * depth"), "matmul_small_m", ROW),
    (Mutant("fp8_whole_scale_read_as_rows", "matmul_fp8.py", "w_scales.stride(0) if w_scales.shape[0] > 1 else 0", "1"), "matmul_fp8", replace(FP8_ROWS, n=64)),
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


@pytest.mark.parametrize(("mutant", "name", "case"), MUTANTS, ids=[str(mutant) for mutant, _, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_is_caught(interpreted, mutant, name, case):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, name, case)


@pytest.mark.parametrize(
    ("name", "case"), sorted({(name, case) for _, name, case in MUTANTS}, key=str), ids=str
)
@pytest.mark.matrix
def test_the_kernel_without_the_mistake_passes(interpreted, name, case):
    interpreted(run_mutant, Mutant("none", "", "", ""), name, case)


def test_two_mistakes_of_one_name_in_one_file_are_two_packages():
    first = Mutant("same", "split_k.py", "== num_splits - 1", "== num_splits - 2")
    second = replace(first, new="== num_splits - 3")
    assert "num_splits - 2" in Path(package(first).__file__).with_name("split_k.py").read_text()
    assert "num_splits - 3" in Path(package(second).__file__).with_name("split_k.py").read_text()
