# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama and a tiny mixture of experts, compiled for CUDA, in Triton's interpreter: every product runs on a Triton kernel, and logits are the CPU's."""

from __future__ import annotations

import pytest
from few_of import few_of
from model_float8 import ends, model
from model_runs import run
from turned_runs import run as run_turned


@pytest.mark.parametrize(
    ("variant", "quant", "seq", "kernel"),
    few_of(
        [
            ("plain", None, 5, "triton_norm_gated"),
            ("plain", None, 40, "triton_norm_gated"),
            ("biases, gelu, tied", None, 5, "triton_norm_gated"),
            ("plain", "int4", 5, "triton_int4"),
            ("plain", "int8", 5, "triton_int8"),
            ("experts", None, 5, "triton_experts"),
        ],
        3,
    ),
    ids=lambda value: str(value),
)
def test_a_language_model_runs_on_the_kernels_and_agrees_with_the_cpu(
    interpreted, variant, quant, seq, kernel
):
    found = interpreted(run, variant, quant, seq)
    # float16 rounds to 5e-4; a kernel rounds once where the CPU rounds after every op.
    assert max(found[name] for name in ("prefill", "decode", "logits")) < 4e-3
    assert found["again"]
    assert kernel in found["kernels"]
    # The head is left as it is; where nothing else is, all its products are of a norm.
    assert {"triton_product", "triton_norm_product"} & set(found["kernels"])
    assert found["linear"] == []
    assert not {"dequantize", "unpack_int4"} & set(found["kernels"])
    packed, plain = found["bytes"]
    assert packed == plain


def test_a_model_in_float8_rounds_weights_and_activations_and_nothing_else(interpreted):
    found = interpreted(model, "float32")
    # The same roundings in float64: float32 sums differ by 1e-7, so hardly an activation falls to another code.
    assert found["rounded alike"] < 1e-5
    # e4m3 is off by at most 2**-4 of a value, by 0.026 of it on average (root mean square, values spread evenly over an octave),
    # and what the layers add up keeps that: 0.013 to 0.021 were found here.
    assert 0.005 < found["weights rounded"] < 0.03
    assert 0.005 < found["activations rounded"] < 0.03
    assert 0.005 < found["both rounded"] < 0.04


@pytest.mark.parametrize("rows", few_of([17, 1, 70]))
def test_products_in_float8_are_off_by_no_more_than_the_rounding_of_activations(interpreted, rows):
    kernels = interpreted(ends, rows)
    assert "triton_fp8" in kernels
    assert not {"dequantize", "linear", "matmul", "triton_product"} & set(kernels)


@pytest.mark.parametrize(
    ("quant", "kernels"),
    [
        (None, ["triton_gated", "triton_product"]),
        ("int4", ["triton_int4"]),
        ("int8", ["triton_int8"]),
        ("fp8", ["triton_fp8"]),
    ],
)
def test_weights_in_the_other_order_are_turned_and_give_the_same(interpreted, quant, kernels):
    forward, strided, found = interpreted(run_turned, quant)
    # In float8 activations are rounded as well, by 0.026 of them on average: three products in a row.
    assert forward < (0.05 if quant == "fp8" else 2e-3)
    assert strided < 2e-3
    assert found == kernels
