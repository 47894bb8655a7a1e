# SPDX-License-Identifier: Apache-2.0
"""8-bit floating point: every code decoded and encoded by the kernels, and the shapes of scales that they take."""

from __future__ import annotations

from types import ModuleType

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_checks import Guarded
from kernel_memory import watched
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, matmul_fp8, quantize_fp8
from nnfront_kernels.quantized import FP8, dequantize_fp8
from nnfront_kernels.quantized import quantize_fp8 as quantize

BLOCK = 128


def value_of(code: int) -> float:
    """e4m3fn by its definition: a sign, four bits of exponent biased by 7, three of mantissa, and one NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if sign else size


def products_with_one(arch: str) -> list[float]:
    """The first column of x @ [1, 0, 0, ...] where x[i, 0] is code i: what the kernel takes each code for."""
    x = torch.zeros(256, 16, dtype=torch.uint8)
    x[:, 0] = torch.arange(256)
    w = torch.zeros(16, 16, dtype=torch.uint8)
    w[:, 0] = 0x38  # 1.0
    one = torch.ones(1, 1)
    y = matmul_fp8.launch(x.view(FP8), w.view(FP8), one, one, out_dtype=torch.float32, arch=arch)
    return y[:, 0].tolist()


def test_every_code_is_decoded_to_its_value(interpreted):
    expected = torch.tensor([value_of(code) for code in range(256)])
    got = torch.tensor(interpreted(products_with_one, "sm_80"))
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_every_finite_code_is_multiplied_natively(interpreted):
    # The interpreter's own fp8 has no NaN: it takes the two codes for 480.
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    got = interpreted(products_with_one, "sm_90")
    assert [got[code] for code in finite] == [value_of(code) for code in finite]


def test_the_weights_rounding_is_to_the_nearest_code():
    w = torch.randn(130, 257, generator=torch.Generator().manual_seed(0)) * 3
    q, scales = quantize(w, BLOCK, BLOCK)
    assert scales.shape == (2, 3)
    steps = scales.repeat_interleave(BLOCK, 0)[:130].repeat_interleave(BLOCK, 1)[:, :257]
    nearest = (w / steps)[..., None].double() - torch.tensor(
        [value_of(code) for code in range(256) if code & 0x7F != 0x7F], dtype=torch.float64
    )
    error = (dequantize_fp8(q, scales, BLOCK, BLOCK).double() / steps.double() - (w / steps).double()).abs()
    assert (error <= nearest.abs().amin(2) + 448 * 2.0**-22).all()  # two ways of dividing
    largest = dequantize_fp8(q, scales, BLOCK, BLOCK).abs()[:128, :128].max()
    assert float(largest) == pytest.approx(float(w[:128, :128].abs().max()), rel=1e-6)


def encoded(package: ModuleType, name: str, rows: int, depth: int, gap: int) -> None:
    """Quantise values of all magnitudes on poisoned buffers; AssertionError unless bits equal torch's."""
    generator = torch.Generator().manual_seed(rows * depth)
    dtype = getattr(torch, name)
    spread = torch.exp2(6 * torch.randn(rows, depth, generator=generator)).clamp(2.0**-14, 30000)
    values = (spread * torch.randn(rows, depth, generator=generator)).clamp(-60000, 60000).to(dtype)
    values[: rows // 2, :BLOCK] = 0
    values[: rows // 4] = 0
    # A row whose scale is 1, of halfway values: the odd ones between 16 and 32.
    values[-1] = 17 + 2 * (torch.arange(depth) % 8)
    values[-1, ::BLOCK] = 448
    x = torch.full((rows, depth + gap), float("nan"), dtype=dtype)[:, :depth].copy_(values)
    runs = []
    for pattern in (0xFF, 0x5A):
        q = Guarded(rows, depth, torch.uint8, gap, 0, pattern)
        scales = Guarded(rows, 1, torch.float32, gap, 0, pattern)
        plan = package.quantize_fp8.plan(x, out=q.view.view(FP8), scales=scales.view)
        with watched(plan.arguments):
            plan.launch()
        q.check()
        scales.check()
        runs.append((q.view.clone(), scales.view.clone()))
    want, want_scales = quantize(values, 1, max(depth, 1))
    for q_view, scales_view in runs:
        assert torch.equal(scales_view, want_scales), "scales differ"
        assert torch.equal(q_view, want.view(torch.uint8)), "codes differ"


SHAPES = [(1, 1), (1, 129), (2, 16), (15, 64), (17, 128), (16, 257), (63, 127), (65, 1040), (3, 2064)]


@pytest.mark.parametrize("shape", few_of([(shape,) for shape in SHAPES], 2), ids=str)
def test_activations_are_quantised_bit_for_bit_like_torch(interpreted, shape):
    name = "float32" if SHAPES.index(shape) % 2 else "float16"
    interpreted(encode_mutant, Mutant("none", "", "", ""), name, *shape)


def encode_mutant(mutant: Mutant, name: str, rows: int, depth: int) -> None:
    encoded(package(mutant), name, rows, depth, 5)


MUTANTS = [
    Mutant("ties_away_from_even", "quantize_fp8.py", "0x7FFFF + ((size >> 20) & 1)", "0x80000"),
    Mutant("truncated", "quantize_fp8.py", "size + 0x7FFFF + ((size >> 20) & 1)", "size"),
    Mutant("subnormals_flushed", "quantize_fp8.py", "tl.where(size < 0x3C800000, subnormal, normal)", "tl.where(size < 0x3C800000, 0, normal)"),
    Mutant("code_without_sign", "quantize_fp8.py", "(code | (bits >> 24 & 0x80))", "code"),
    Mutant("largest_of_the_last_block", "quantize_fp8.py", "largest = tl.maximum(largest, ", "largest = tl.maximum(0 * largest, "),
    Mutant("negative_values_overlooked", "quantize_fp8.py", "tl.max(tl.abs(x), axis=1)", "tl.max(x, axis=1)"),
    Mutant("column_mask_of_the_codes", "quantize_fp8.py", "limited, z)), mask=at < K)", "limited, z)), mask=at < K + 1)"),
    Mutant("scale_inverted", "quantize_fp8.py", "tl.div_rn(largest, full))", "tl.div_rn(full, largest))"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
@pytest.mark.matrix
def test_mutant_of_the_rounding_is_caught(interpreted, mutant):
    with pytest.raises(AssertionError):
        interpreted(encode_mutant, mutant, "float32", 5, 2500)


def every_rounding() -> list[int]:
    """Encode each representable value, each midpoint between two and its neighbours; the codes as integers."""
    values = _roundings()
    x = torch.cat([values, torch.tensor([448.0])])[None, :]  # the scale is 1
    return quantize_fp8.launch(x)[0].view(torch.uint8)[0].tolist()


def _roundings() -> torch.Tensor:
    exact = torch.tensor(sorted({value_of(code) for code in range(256) if code & 0x7F != 0x7F}))
    middle = (exact[:-1] + exact[1:]) / 2
    points = torch.cat([exact, middle])
    infinity = torch.tensor(float("inf"))
    return torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)]).clamp(
        -448, 448
    )


def test_every_rounding_is_to_the_nearest_with_ties_to_even(interpreted):
    values = _roundings().double()
    codes = [code for code in range(256) if code & 0x7F != 0x7F and code != 0x80]
    exact = torch.tensor([value_of(code) for code in codes], dtype=torch.float64)
    distance = (values[:, None] - exact).abs()
    tie = distance == distance.amin(1, keepdim=True)
    even = torch.tensor([code % 2 == 0 for code in codes])
    choice = torch.where(tie.sum(1, keepdim=True) == 2, tie & even, tie).int().argmax(1)
    got = torch.tensor([value_of(code) for code in interpreted(every_rounding)[:-1]], dtype=torch.float64)
    assert torch.equal(got, exact[choice])


def not_numbers() -> tuple[list[int], list[int]]:
    x = torch.ones(2, 4)
    x[0, 1] = float("nan")
    x[1, 1] = float("inf")
    q = quantize_fp8.launch(x)[0].view(torch.uint8)
    return q[0].tolist(), q[1].tolist()


def test_what_is_no_number_stays_none(interpreted):
    nan_row, infinite_row = interpreted(not_numbers)
    assert nan_row[1] & 0x7F == 0x7F
    assert infinite_row[1] & 0x7F == 0x7F


def empty() -> list[tuple[int, ...]]:
    q, scales = quantize_fp8.launch(torch.zeros(0, 32))
    y = matmul_fp8.launch(q, torch.zeros(16, 32).to(FP8), scales, torch.ones(1, 1))
    return [tuple(t.shape) for t in (q, scales, y)]


def test_no_rows_give_no_rows(interpreted):
    assert interpreted(empty) == [(0, 32), (0, 1), (0, 16)]


def tensor(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"w": tensor(16, 255, dtype=FP8)}, r"w must have shape \[16, 256\], got \[16, 255\]"),
    ({"x": tensor(3, 256, dtype=torch.float8_e5m2), "w": tensor(16, 256, dtype=torch.float8_e5m2)}, "matmul_fp8: dtype must be float8_e4m3fn, got 'float8_e5m2'"),
    ({"arch": "sm_70"}, "matmul_fp8: arch must be one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120, got 'sm_70'"),
    ({"x_scales": tensor(2, 1)}, r"x_scales must have shape \[3, 1\] or \[1, 1\], got \[2, 1\]"),
    ({"w_scales": tensor(1, 2)}, r"w_scales must have shape \[16, 1\] or \[1, 1\], got \[1, 2\]"),
    ({"w_scales": tensor(16, 1, dtype=torch.float16)}, "w_scales must be torch.float32, got torch.float16"),
    ({"x": tensor(3, 264, dtype=FP8)[:, :256]}, "matmul_fp8: rows of x and w must start at multiples of 16 bytes"),
    ({"x": tensor(3, 24, dtype=FP8), "w": tensor(16, 24, dtype=FP8)}, "matmul_fp8: K must be a multiple of 16 and at least 16, got 24"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_matmul_fp8_says_what_does_not_fit(changes, message):
    right = {
        "x": tensor(3, 256, dtype=FP8),
        "w": tensor(16, 256, dtype=FP8),
        "x_scales": tensor(3, 1),
        "w_scales": tensor(16, 1),
        "arch": "sm_90",
    }
    with pytest.raises(KernelError, match=message):
        matmul_fp8.plan(**{**right, **changes})


def test_groups_are_refused():
    refusal = matmul_fp8.accepts(
        nnfront_kernels.matmul_fp8.MatmulShape(1, 64, 64, group=64), FP8_NAME, "sm_90"
    )
    assert refusal == "scales are for rows, got groups of 64"


FP8_NAME = "float8_e4m3fn"
WRONG_TO_QUANTISE = [
    ({"x": tensor(3, 8, dtype=torch.float64)}, "quantize_fp8: dtype must be one of float16, bfloat16, float32, got 'float64'"),
    ({"arch": "sm_70"}, "quantize_fp8: arch must be one of"),
    ({"x": tensor(8, 3).T}, "x must have adjacent elements"),
    ({"out": tensor(3, 8)}, "out must be torch.float8_e4m3fn, got torch.float32"),
    ({"scales": tensor(3, 2)}, r"scales must have shape \[3, 1\], got \[3, 2\]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), WRONG_TO_QUANTISE, ids=[message[:40] for _, message in WRONG_TO_QUANTISE]
)
def test_quantize_fp8_says_what_does_not_fit(changes, message):
    arguments = {"x": tensor(3, 8), "arch": "sm_90", **changes}
    with pytest.raises(KernelError, match=message):
        quantize_fp8.plan(arguments.pop("x"), **arguments)
