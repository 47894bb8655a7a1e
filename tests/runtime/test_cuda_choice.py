# SPDX-License-Identifier: Apache-2.0
"""Which of cuBLAS and the Triton kernels a product on a GPU goes to, planned on tensors without data, and that what is computed there is right."""

from __future__ import annotations

import pytest
import torch
from nnfront_kernels import quantized
from nnfront_kernels.common import launched_by, planning_for

import nnfront as nn
from nnfront.backends.cuda import many_rows
from nnfront.backends.cuda.many_rows import takes_cublas
from nnfront.backends.table import resolver
from nnfront.ir import parse
from nnfront.lower import Run


@pytest.mark.parametrize(
    ("is_gpu", "rows", "has_end", "expected"),
    [
        (True, 65, False, True),
        (True, 64, False, False),  # the kernel that splits K
        (True, 65, True, False),  # the end is done in registers
        (False, 4096, False, False),  # the interpreter is to run the kernels
    ],
)
def test_cublas_takes_plain_products_of_many_rows(is_gpu, rows, has_end, expected):
    assert takes_cublas(is_gpu=is_gpu, rows=rows, has_end=has_end) is expected


def launched(arch: str, rows: int, n: int = 256, k: int = 128, **options) -> list[str]:
    """The kernels that a product of so many rows launches on an architecture; cuBLAS is none of them."""
    made: list[str] = []
    for name in ("bias", "residual"):
        if name in options:
            shape = (n,) if name == "bias" else (rows, n)
            options[name] = torch.empty(shape, dtype=options[name], device="meta")
    x, w = (torch.empty(m, k, dtype=torch.bfloat16, device="meta") for m in (rows, n))
    with planning_for(arch), launched_by(lambda plan: made.append(plan.kernel.__name__)):
        y = many_rows.product(x, w, **options)
    assert y.shape == (rows, n // 2 if options.get("gated") else n)
    return made


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("arch", "rows", "options", "expected"),
    [
        ("sm_90", 64, {}, ["matmul_small_m_kernel"]),
        ("sm_90", 65, {}, []),
        ("sm_90", 65, {"bias": BF16}, []),
        ("sm_90", 65, {"residual": BF16}, []),  # cuBLAS adds to it
        ("sm_90", 65, {"residual": torch.float32}, ["matmul_tma_kernel"]),
        ("sm_90", 65, {"residual": BF16, "bias": BF16}, ["matmul_tma_kernel"]),
        ("sm_90", 65, {"gated": True, "activation": "silu"}, ["matmul_tma_kernel"]),
        ("sm_100", 65, {"gated": True, "activation": "silu"}, ["matmul_tma_kernel"]),
        ("sm_80", 65, {"gated": True, "activation": "silu"}, ["matmul_kernel"]),
        ("sm_90", 65, {"gated": True, "activation": "silu", "k": 132}, ["matmul_kernel"]),
        ("sm_90", 65, {"gated": True, "activation": "silu", "n": 248}, ["matmul_kernel"]),
        ("sm_90", 4, {"gated": True, "activation": "silu"}, ["matmul_small_m_kernel"]),
    ],
)
def test_a_product_goes_where_its_rows_and_its_end_say(arch, rows, options, expected):
    assert launched(arch, rows, **options) == expected


def test_a_residual_is_added_before_the_only_rounding(monkeypatch):
    monkeypatch.setattr(many_rows, "on_gpu", lambda x: True)
    x, w, r = (torch.randn(*s).bfloat16() for s in ((65, 96), (80, 96), (65, 80)))
    found = many_rows.product(x, w, residual=r)
    exact = x.double() @ w.double().t() + r.double()
    assert (
        torch.equal(found, exact.bfloat16())
        or (found.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    )
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize(("arch", "rows"), [("sm_80", 457), ("sm_90", 603), ("sm_100", 823)])
def test_weights_in_few_bits_are_unpacked_for_so_many_rows_that_tiles_would_lose_more(arch, rows):
    def unpacks(
        count: int, *, k: int = 64, device: str = "meta", dtype: torch.dtype = torch.bfloat16
    ) -> bool:
        with planning_for(arch):
            return many_rows.unpacks(torch.empty(count, k, device=device, dtype=dtype))

    assert [unpacks(rows - 1), unpacks(rows)] == [False, True]
    assert not unpacks(rows, device="cpu")
    assert not unpacks(rows, k=72)
    assert not unpacks(rows, dtype=torch.float32)


DENSE = """
def main[n](x: input bfloat16[n, 256], w: weight bfloat16[512, 256]) -> bfloat16[n, 512] {
    y: bfloat16[n, 512] = linear(x, w)
    return y
}
"""


@pytest.mark.parametrize(
    ("quant", "rows", "kernels"),
    [
        ("int4", 603, ["unpack_weight_kernel"]),
        ("int4", 602, ["matmul_int4_kernel"]),
        ("int8", 603, ["unpack_weight_kernel"]),
        ("int8", 602, ["matmul_int8_kernel"]),
    ],
)
def test_a_product_of_many_rows_is_an_unpacking_and_cublas(quant, rows, kernels):
    ir = nn.passes.quantize_weights(parse(DENSE), quant)
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    method = nn.compile(ir, target="cuda:sm_90").program.methods["main"]
    (run,) = (i for i in method.body.walk() if isinstance(i, Run) and i.kernel == f"triton_{quant}")
    made: list[str] = []
    width, kind = (128, torch.uint8) if quant == "int4" else (256, torch.int8)
    w = torch.empty(512, width, dtype=kind, device="meta")
    scales = torch.empty(2 if quant == "int4" else 1, 512, dtype=torch.bfloat16, device="meta")
    x = torch.empty(rows, 256, dtype=torch.bfloat16, device="meta")
    with planning_for("sm_90"), launched_by(lambda plan: made.append(plan.kernel.__name__)):
        y = resolver("cuda:sm_90")(run)(x, w, scales, None, None)
    assert made == kernels
    assert (y.shape, y.dtype) == ((rows, 512), torch.bfloat16)


def test_products_in_float8_of_many_rows_are_those_of_the_scaled_codes():
    x, w = torch.randn(80, 64), torch.randn(32, 64)
    (codes, x_scales), (weight, scales) = (quantized.quantize_fp8(part, 1, 64) for part in (x, w))
    bias = torch.randn(32).bfloat16()
    found = many_rows.scaled(codes, weight, x_scales, scales, bias)
    dense = [quantized.dequantize_fp8(*part, 1, 64) for part in ((codes, x_scales), (weight, scales))]
    expected = dense[0] @ dense[1].t() + bias.float()
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() <= 2**-7 * expected.abs().max()


@pytest.mark.parametrize(
    ("arch", "rows", "dtype", "k", "expected"),
    [
        ("sm_90", 65, torch.bfloat16, 64, True),
        ("sm_90", 64, torch.bfloat16, 64, False),
        ("sm_90", 65, torch.float16, 64, False),  # scales by row give bfloat16 alone
        ("sm_90", 65, torch.bfloat16, 72, False),
        ("sm_80", 65, torch.bfloat16, 64, False),
    ],
)
def test_scaled_products_go_to_torch_where_it_has_them(arch, rows, dtype, k, expected):
    x, codes = (torch.empty(rows, k, dtype=each, device="meta") for each in (dtype, torch.float8_e4m3fn))
    with planning_for(arch):
        assert many_rows.takes_scaled(x, codes, torch.empty(32, k, device="meta"), None) is expected


PRODUCT = """
def main[n](x: input bfloat16[n, 64], w: weight bfloat16[64, 64], v: input bfloat16[64, 64]) -> bfloat16[n, 64] {
    a: bfloat16[n, 64] = linear(x, w)
    b: bfloat16[n, 64] = linear(a, v)
    return b
}
"""


def test_weights_that_loading_binds_are_fetched_while_the_launch_before_ends_and_others_are_not():
    made: list[bool] = []
    method = nn.compile(parse(PRODUCT), target="cuda:sm_90").program.methods["main"]
    products = [i for i in method.body.walk() if isinstance(i, Run) and i.kernel == "triton_product"]
    x, w = (torch.empty(m, 64, dtype=torch.bfloat16, device="meta") for m in (4, 64))
    with (
        planning_for("sm_90"),
        launched_by(lambda plan: made.append(plan.constants["FETCH"])),
    ):
        for run in products:
            resolver("cuda:sm_90")(run)(x, w, None, None, None)
    assert [bool(count) for count in made] == [True, False]
