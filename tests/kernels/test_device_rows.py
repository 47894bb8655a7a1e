# SPDX-License-Identifier: Apache-2.0
"""Norms, softmax and gated activations of compiled methods run on the Triton kernels, in the interpreter, and give what the CPU gives."""

from __future__ import annotations

import pytest
from few_of import few_of
from rows_runs import (
    CASES,
    EXPERTS,
    FLOAT64,
    REFUSED,
    agree,
    experts,
    explained,
    feed,
    model_kernels,
    wide_residual,
)


@pytest.mark.parametrize("batch", few_of([3, 0]))
@pytest.mark.parametrize("dtype", few_of(["float32", "float16"]))
@pytest.mark.parametrize("name", CASES)
def test_rows_on_the_kernels_are_those_of_the_cpu(interpreted, name, dtype, batch):
    kernels = interpreted(agree, name, dtype, batch)
    assert CASES[name][2] in kernels
    assert not {"rms_norm", "layer_norm", "softmax", "multiply", "silu", "gelu", "swiglu"} & kernels - (
        {"multiply"} if name == "layer norm of a sum" else set()
    )


@pytest.mark.parametrize("name", CASES)
def test_explain_names_the_kernel_of_rows(interpreted, name):
    assert CASES[name][2] in interpreted(explained, "taken", name, "float16")


@pytest.mark.parametrize("name", REFUSED)
def test_explain_says_why_rows_are_left_to_torch(interpreted, name):
    assert REFUSED[name][2] in interpreted(explained, "refused", name, "float32")


@pytest.mark.parametrize("name", FLOAT64)
def test_rows_of_a_dtype_that_kernels_do_not_have_are_left_to_torch(interpreted, name):
    assert FLOAT64[name] in interpreted(explained, "taken", name, "float64")


# Rows of experts are read by their router as well: they are normalised by a launch of their own.
NORMS = {
    "llama": {"triton_norm_product", "triton_norm_gated"},
    "qwen3_moe": {"triton_norm_product", "triton_rms_norm", "triton_norm_residual"},
}


@pytest.mark.parametrize("file", NORMS)
def test_every_norm_of_a_language_model_runs_on_the_kernels(interpreted, file):
    for rows in interpreted(model_kernels, file).values():
        assert {kernel for _, kernel, _ in rows} >= NORMS[file]
        assert all(kernel.startswith("triton_") for _, kernel, _ in rows)
        if file == "qwen3_moe":
            assert {module for op, _, module in rows if op == "rms_norm"} >= {"q_norm", "k_norm"}
            assert ("softmax", "triton_softmax") in {(op, kernel) for op, kernel, _ in rows}


@pytest.mark.parametrize(
    ("quant", "product"), [(None, "triton_product"), ("int8", "triton_int8"), ("int4", "triton_int4")]
)
def test_gate_and_up_with_weights_of_their_own_run_on_the_kernels(interpreted, quant, product):
    assert interpreted(feed, quant) == {product, "triton_gated_activation"}


@pytest.mark.parametrize(
    ("quant", "product"),
    [(None, "triton_product"), ("int8", "triton_int8"), ("int4", "triton_int4"), ("fp8", "triton_fp8")],
)
def test_a_residual_in_32_bits_is_added_in_32_bits(interpreted, quant, product):
    kernels, dtype, off = interpreted(wide_residual, quant)
    assert (kernels, dtype) == ({product}, "torch.float32")
    assert off < (1e-6 if quant is None else 1e-4)


@pytest.mark.parametrize("name", few_of(EXPERTS, 2))
def test_experts_with_biases_run_on_the_kernels_whatever_is_between_their_products(interpreted, name):
    assert interpreted(experts, name) == {"triton_experts"}
