# SPDX-License-Identifier: Apache-2.0
"""Products for a GPU: which kernel of `nnfront_kernels` takes them, and what is said where none does."""

from __future__ import annotations

import pytest

import nnfront as nn
from nnfront import op, spec
from nnfront.lower import Run

K, N = 64, 48


def runs(
    method, *, target="cuda:sm_90", dtype="float16", quant=None, sizes=(K, N), read_rows=False
) -> list[Run]:
    """The instructions of a method over x [n, K] and weights `w` [N, K], `turned` [K, N], which another method may read too."""

    class Model(nn.Module):
        def __init__(self) -> None:
            k, n = sizes
            self.w = nn.Parameter((n, k), dtype=dtype)
            self.turned = nn.Parameter((k, n), dtype=dtype)
            self.grouped = op.quantize(self.w, group_size=8, dtype="float8_e4m3fn", scale_dtype="float32")
            self.halves = op.quantize(self.w, dtype="float8_e4m3fn")

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return method(self, x)

        def rows(self, indices: nn.Tensor) -> nn.Tensor:
            return op.take(self.w, indices, axis=0), op.take(self.turned, indices, axis=0)

    specs = {"forward": {"x": spec.Tensor(["n", sizes[0]], dtype)}}
    if read_rows:
        specs["rows"] = {"indices": spec.Tensor(["m"], "int64")}
    ir = Model().export(specs)
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
        (in_groups, {}, "triton_fp8: the format is fp8 in groups of 8, it takes fp8"),
        (with_half_scales, {}, "triton_fp8: scales are float16, not float32"),
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


def turned(model, x):
    return op.matmul(x, model.turned)


def turned_with_an_end(model, x):
    return op.silu(op.matmul(x, model.turned))


def turned_gated(model, x):
    gate, up = op.split(op.matmul(x, model.turned), 2, -1)
    return op.silu(gate) * up


def transposed(model, x):
    return op.matmul(x, op.permute_dims(model.w))


@pytest.mark.parametrize(
    ("method", "kernel"),
    [
        (turned, "triton_product"),
        (turned_with_an_end, "triton_product"),
        (turned_gated, "triton_gated"),
        (transposed, "triton_product"),
    ],
)
def test_a_weight_in_the_other_order_is_turned_once_and_its_product_is_one_kernel(method, kernel):
    assert [run.kernel for run in runs(method)] == [kernel]


@pytest.mark.parametrize("quant", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("method", [turned, turned_gated, transposed])
def test_quantised_weights_in_the_other_order_reach_their_kernels_too(method, quant):
    found = runs(method, quant=quant)
    assert [run.kernel for run in found if run.op != "permute_dims"] == [f"triton_{quant}"]


@pytest.mark.parametrize("method", [turned, turned_with_an_end, turned_gated])
def test_a_weight_that_is_read_in_its_own_order_too_is_not_kept_twice(method):
    reason = "triton_product: something else reads the weight as [in, out], and it is not kept twice"
    (product,) = [run for run in runs(method, read_rows=True) if run.op in ("linear", "matmul")]
    assert product.kernel == "linear"
    assert reason in product.refused


def test_gate_and_up_that_are_read_as_they_are_too_stay_in_their_order():
    found = runs(gated, read_rows=True)
    assert "triton_product" in {run.kernel for run in found}
    reason = "triton_gated: something else reads the weight as it is, and it is not kept twice"
    assert reason in {why for run in found for why in run.refused}


def test_quantised_gate_and_up_that_no_kernel_reads_say_so():
    def in_small_groups(model, x):
        gate, up = op.split(op.linear(x, op.dequantize(*model.grouped, None, 8, dtype="float16")), 2, -1)
        return op.silu(gate) * up

    reasons = {why for run in runs(in_small_groups) for why in run.refused}
    assert (
        "triton_gated: something else reads the weight as it is, and it is not kept twice, "
        "or no kernel reads fp8 in groups of 8" in reasons
    )


def test_a_product_with_a_transpose_of_an_input_needs_no_copy():
    class Model(nn.Module):
        def forward(self, x: nn.Tensor, y: nn.Tensor) -> nn.Tensor:
            return op.matmul(x, op.permute_dims(y)), op.linear(x, op.permute_dims(op.permute_dims(y)))

        def strided(self, x: nn.Tensor, y: nn.Tensor) -> nn.Tensor:
            return op.linear(x, op.permute_dims(y))

    x, y = spec.Tensor(["n", K], "float16"), spec.Tensor([N, K], "float16")
    ir = Model().export(
        {"forward": {"x": x, "y": y}, "strided": {"x": x, "y": spec.Tensor([K, N], "float16")}}
    )
    methods = nn.compile(ir, target="cuda:sm_90").program.methods
    forward, strided = (
        [run for run in methods[name].body.walk() if isinstance(run, Run)] for name in ("forward", "strided")
    )
    assert "triton_product" in {run.kernel for run in forward}
    (product,) = [run for run in strided if run.op == "linear"]
    assert product.refused == ("triton_product: the weight is a view, its rows are not adjacent",)
