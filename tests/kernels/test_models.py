# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama and a tiny mixture of experts, compiled for CUDA, in Triton's interpreter: every product runs on a Triton kernel, and logits are the CPU's."""

from __future__ import annotations

import pytest
from model_runs import run


@pytest.mark.parametrize(
    ("variant", "quant", "seq", "kernel"),
    [
        ("plain", None, 5, "triton_gated"),
        ("plain", None, 40, "triton_gated"),
        ("biases, gelu, tied", None, 5, "triton_gated"),
        ("plain", "int4", 5, "triton_int4"),
        ("plain", "int8", 5, "triton_int8"),
        ("experts", None, 5, "triton_experts"),
    ],
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
    assert "triton_product" in found["kernels"]
    assert found["linear"] == []
    assert not {"dequantize", "unpack_int4"} & set(found["kernels"])
    packed, plain = found["bytes"]
    assert packed == plain
