# SPDX-License-Identifier: Apache-2.0
"""Products that divide the rows of x by their root mean square: against float64, in the interpreter and with mistakes in them."""

from __future__ import annotations

from dataclasses import replace

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_cases import EPS, Case, powers_of_two, run
from kernel_checks import Guarded
from kernel_mutants import Mutant, package
from nnfront_kernels.common import KernelError
from nnfront_kernels.row_norm import normalised
from nnfront_kernels.split_k import needed

# Config 3 has one block for a tile, 1 two and 2 three.
DENSE = Case(15, 63, 257, norm=True, bias=True, activation="silu", config=1)
ROW = Case(1, 63, 1030, norm=True, residual=True, config=8)
INT4 = Case(15, 65, 192, group=32, zero_points=True, norm=True, gated=True, activation="silu", config=1)
INT8 = Case(15, 64, 192, group=0, norm=True, scale=0.5, config=2)
WEIGHTED = Case(15, 63, 257, norm=True, norm_weight=True, bias=True, config=1)
CASES = [
    ("matmul_small_m", WEIGHTED),
    ("matmul_small_m", replace(ROW, norm_weight=True)),
    ("matmul_small_m", replace(DENSE, m=16, n=129, k=512, norm_weight=True, config=3)),
    ("matmul_int4", replace(INT4, norm_weight=True)),
    ("matmul_int8", replace(INT8, norm_weight=True)),
    ("matmul_int8", replace(INT8, group=32, m=1, norm_weight=True, config=1, gated=True, activation="silu")),
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


@pytest.mark.parametrize(("name", "case"), few_of(CASES, 6), ids=[f"{name}-{case}" for name, case in CASES])
def test_rows_are_normalised_inside_of_the_product(interpreted, name, case):
    interpreted(run_here, name, case)


MUTANTS = [
    (Mutant("eps_dropped", "row_norm.py", "squares / K + eps", "squares / K"), "matmul_small_m", DENSE),
    (Mutant("mean_of_a_part", "row_norm.py", "squares / K", "squares / (K + 1)"), "matmul_small_m", replace(DENSE, k=16)),
    (Mutant("no_root", "row_norm.py", "tl.sqrt_rn(squares / K + eps)", "(squares / K + eps)"), "matmul_small_m", DENSE),
    (Mutant("squares_of_one_split", "split_k.py", "squares += tl.load(rows", "squares = tl.load(rows"), "matmul_small_m", DENSE),
    (Mutant("squares_where_sums_are", "split_k.py", "num_splits * SIZE + BLOCK_M * BLOCK_N + tl.arange(0, BLOCK_M)\n        tl.store", "num_splits * SIZE + tl.arange(0, BLOCK_M)\n        tl.store"), "matmul_small_m", DENSE),
    (Mutant("half_a_group", "matmul_int4.py", "add_squares(add_squares(squares, x_first), x_second)", "add_squares(squares, x_first)"), "matmul_int4", INT4),
    (Mutant("weight_of_other_columns", "matmul_int4.py", "norm_rows + HALF", "norm_rows"), "matmul_int4", replace(INT4, norm_weight=True)),
    (Mutant("weight_squared_too", "row_norm.py", "wide = x.to(tl.float32) * weight", "wide = weight.to(tl.float32) * weight"), "matmul_small_m", WEIGHTED),
    (Mutant("weight_beyond_the_row", "matmul_int8.py", "norm_ptr + norm_at", "norm_ptr + norm_at + 1"), "matmul_int8", replace(INT8, norm_weight=True)),
    (Mutant("bytes_not_normalised", "split_k.py", "acc = divided(acc, squares, K, norm_eps)", "acc = acc"), "matmul_int8", INT8),
]  # fmt: skip


def run_mutant(mutant: Mutant, name: str, case: Case) -> None:
    run(package(mutant), name, case)


@pytest.mark.parametrize(
    ("mutant", "name", "case"), few_of(MUTANTS, 3), ids=[str(mutant) for mutant, _, _ in MUTANTS]
)
def test_mistakes_in_the_norm_are_found(interpreted, mutant, name, case):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, name, case)


def rounded(rows: int, depth: int, name: str) -> None:
    """Normalise rows and round them to float8 on poisoned buffers; AssertionError unless each is within half a step of the float64 answer."""
    generator = torch.Generator().manual_seed(rows * depth)
    x = torch.randn(rows, depth, generator=generator).to(getattr(torch, name))
    weight = powers_of_two(depth, generator)
    want = torch.nn.functional.rms_norm(x.double(), (depth,), weight.double(), EPS)
    for pattern in (0xFF, 0x5A):
        q, scales = (
            Guarded(rows, depth, torch.uint8, 0, 0, pattern),
            Guarded(rows, 1, torch.float32, 0, 0, pattern),
        )
        out = {"out": q.view.view(torch.float8_e4m3fn), "scales": scales.view}
        plan = nnfront_kernels.quantize_fp8.plan(x, norm_eps=EPS, norm_weight=weight, **out)
        plan.launch()
        q.check()
        scales.check()
        largest = want.abs().amax(1, keepdim=True)
        assert torch.allclose(scales.view.double(), largest / 448, rtol=1e-6)
        step = torch.exp2((want / scales.view).abs().clamp(min=2.0**-6).log2().floor() - 3)
        assert ((out["out"].double() - want / scales.view).abs() <= step * (0.5 + 1e-4)).all()
    codes, beside = nnfront_kernels.quantize_fp8.reference(x, norm_eps=EPS, norm_weight=weight)
    assert torch.allclose(beside, scales.view, rtol=1e-6)
    assert ((codes.double() - out["out"].double()).abs() <= step).all()


@pytest.mark.parametrize(
    ("rows", "depth", "name"), few_of([(3, 2064, "float16"), (1, 129, "float32"), (17, 16, "float16")])
)
def test_rows_are_normalised_on_their_way_to_float8(interpreted, rows, depth, name):
    interpreted(rounded, rows, depth, name)


def largest_numbers() -> torch.Tensor:
    """A product of a row of float16 whose largest element is beyond float16's range once it is multiplied by the norm's weight."""
    x, w = torch.full((2, 64), 40000.0, dtype=torch.float16), torch.zeros(16, 64, dtype=torch.float16)
    w[:, 0] = 1
    weight = torch.full((64,), 4.0)
    return nnfront_kernels.matmul_small_m.launch(x, w, norm_eps=EPS, norm_weight=weight)


def test_what_a_weight_takes_out_of_the_range_of_float16_ends_at_its_largest_number(interpreted):
    assert torch.allclose(interpreted(largest_numbers).float(), torch.tensor(65504.0 / 40000), rtol=2e-3)


def test_a_weight_of_a_norm_needs_a_norm_and_is_as_long_as_a_row():
    x, w = torch.empty(2, 32, device="meta").half(), torch.empty(16, 32, device="meta").half()
    weight = torch.empty(31, device="meta")
    for eps, message in (
        (None, "norm_weight is for rows that are normalised, and norm_eps is None"),
        (EPS, r"norm_weight must be a dense \[32\], got \[31\] with strides"),
    ):
        with pytest.raises(KernelError, match=message):
            nnfront_kernels.matmul_small_m.plan(x, w, arch="sm_90", norm_eps=eps, norm_weight=weight)


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
