# SPDX-License-Identifier: Apache-2.0
"""Weights in float8 on a CPU: what a code stands for, and products with codes."""

import pytest
import torch
from nnfront_models import llama

import nnfront as nn
from nnfront.backends.cpu.float8 import decode
from nnfront.backends.table import resolver
from nnfront.lower import Run, Structure

resolve = resolver("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_float8_code_is_decoded_to_its_value(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = torch.tensor([float8_value(code) for code in range(256)])
    is_number = ~expected.isnan()
    # With the two NaN codes, and without them, which is the way that moves bits.
    assert torch.equal(decode(codes, dtype)[is_number], expected[is_number].to(dtype))
    assert decode(codes, dtype)[~is_number].isnan().all()
    assert torch.equal(decode(codes[is_number], dtype), expected[is_number].to(dtype))
    assert decode(codes[:0], dtype).shape == (0,)


def float8_value(code: int) -> float:
    """e4m3fn by its definition: a sign, four bits of exponent biased by 7, three of mantissa, and one NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if sign else size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_products_with_float8_weights_agree_with_float64(rows, bias, dtype, monkeypatch):
    monkeypatch.setattr(
        "nnfront.backends.cpu.quantized_pieces.PIECE", 3 * 32
    )  # pieces that do not divide the rows
    x, q = torch.randn(rows, 32).to(dtype), (torch.randn(14, 32) * 40).to(torch.float8_e4m3fn)
    scales, b, residual = (
        torch.rand(14, 1) / 100,
        torch.randn(14).to(dtype) if bias else None,
        torch.randn(rows, 14).to(dtype),
    )
    attrs = {"format": "fp8", "activation": "silu", "scale": 0.5, "dtype": "float32"}
    got = resolve(Run("fp8_product", "quantized_product", (), Structure(), attrs))(
        x, q, scales, None, b, None, residual
    )
    product = x.double() @ (q.double() * scales.double()).T + (0 if b is None else b.double())
    exact = torch.nn.functional.silu(product) * 0.5 + residual.double()
    eps = torch.finfo(dtype).eps
    most = max([1.0, *product.abs().flatten().tolist()])
    torch.testing.assert_close(got.double(), exact, rtol=8 * eps, atol=16 * eps * most)
    assert got.dtype == torch.float32
    gated = resolve(
        Run(
            "fp8_gated_product",
            "quantized_gated_product",
            (),
            Structure(),
            {"format": "fp8", "activation": "relu"},
        )
    )
    gate, up = product.split(7, -1)
    torch.testing.assert_close(
        gated(x, q, scales, None, b).double(), gate.relu() * up, rtol=8 * eps, atol=16 * eps * most**2
    )


def test_sums_of_codes_that_float16_does_not_hold_do_not_overflow():
    x, q = torch.full((9, 64), 20.0).half(), torch.full((4, 64), 448.0).to(torch.float8_e4m3fn)
    run = Run("fp8_product", "quantized_product", (), Structure(), {"format": "fp8"})
    got = resolve(run)(x, q, torch.full((4, 1), 1e-3), None, None, None, None)
    torch.testing.assert_close(got.float(), torch.full((9, 4), 20 * 448 * 64 * 1e-3), rtol=1e-3, atol=0)


def test_a_language_model_in_float8_runs_on_float8_kernels_on_a_cpu():
    model = llama.build(llama.TINY)
    ir = nn.passes.quantize_weights(model.export(llama.export_spec(llama.TINY)), "fp8")
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))
    runs = [i for m in executable.program.methods.values() for i in m.body.walk() if isinstance(i, Run)]
    assert {"fp8_product", "fp8_gated_product"} <= {run.kernel for run in runs}
    assert not [run for run in runs if run.op == "dequantize" and run.module != "model.embed_tokens"]
