# SPDX-License-Identifier: Apache-2.0
"""Products for a GPU: which kernel of `nnfront_kernels` takes them, and what is said where none does."""

from __future__ import annotations

import pytest

import nnfront as nn
from nnfront import op, spec
from nnfront.lower import Run

K, N = 64, 48


def runs(method, *, target="cuda:sm_90", dtype="float16", quant=None, sizes=(K, N)) -> list[Run]:
    """The instructions of a method over x [n, K] and weights `w` [N, K], `turned` [K, N]."""

    class Model(nn.Module):
        def __init__(self) -> None:
            k, n = sizes
            self.w = nn.Parameter((n, k), dtype=dtype)
            self.turned = nn.Parameter((k, n), dtype=dtype)
            self.grouped = op.quantize(self.w, group_size=8, dtype="float8_e4m3fn", scale_dtype="float32")
            self.halves = op.quantize(self.w, dtype="float8_e4m3fn")

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return method(self, x)

    ir = Model().export({"forward": {"x": spec.Tensor(["n", sizes[0]], dtype)}})
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    found = nn.compile(ir, target=target).program.methods["forward"].body.walk()
    return [run for run in found if isinstance(run, Run)]


def linear(model, x):
    return op.linear(x, model.w)


def gated(model, x):
    gate, up = op.split(op.linear(x, model.w), 2, -1)
    return op.silu(gate) * up


@pytest.mark.parametrize("method", [linear, gated])
@pytest.mark.parametrize(
    ("target", "refused"),
    [
        ("cuda:sm_80", ("triton_fp8: sm_80 has no tensor cores for float8",)),
        ("cuda:sm_90", ()),
        ("cuda:sm_100", ()),
    ],
)
def test_float8_products_run_on_one_kernel_that_says_where_codes_are_decoded(method, target, refused):
    (run,) = [run for run in runs(method, target=target, quant="fp8") if run.kernel.startswith("triton")]
    assert run.kernel == "triton_fp8"
    assert run.refused == refused
    assert ("decoded in registers" in run.why) is bool(refused)


def in_groups(model, x):
    return op.linear(x, op.dequantize(*model.grouped, None, 8, dtype="float16"))


def with_half_scales(model, x):
    return op.linear(x, op.dequantize(*model.halves))


def relu(model, x):
    return op.relu(op.linear(x, model.w))


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        (in_groups, {}, "triton_fp8: the weight has no single float32 scale for each output"),
        (with_half_scales, {}, "triton_fp8: the weight has no single float32 scale for each output"),
        (relu, {"quant": "fp8"}, "triton_fp8: there is no relu in the kernel"),
        (
            linear,
            {"quant": "fp8", "sizes": (40, N)},
            "triton_fp8: K must be a multiple of 16 and at least 16, got 40",
        ),
        (
            linear,
            {"quant": "fp8", "dtype": "float64"},
            "triton_fp8: activations cannot be rounded: dtype must be one of float16, bfloat16, float32, got 'float64'",
        ),
    ],
)
def test_float8_products_that_no_kernel_takes_are_taken_apart_and_say_why(method, options, reason):
    found = runs(method, **options)
    assert "triton_fp8" not in {run.kernel for run in found}
    assert "dequantize" in {run.op for run in found}
    assert reason in {why for run in found for why in run.refused}
