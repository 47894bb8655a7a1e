# SPDX-License-Identifier: Apache-2.0
"""Weights in the order of the kernels: what is turned, that results stay the same, and that no copy is kept beside the old one."""

from __future__ import annotations

import pytest
from pass_checks import expect_same_results, module

import nnfront as nn
from nnfront import op, spec
from nnfront.ir import first_difference, parse
from nnfront.passes import lift_transform_params, quantize_weights, transpose_weights

D, F = 32, 48
X = {"x": spec.Tensor(["n", D], "float32")}


class Model(nn.Module):
    def __init__(self) -> None:
        self.w = nn.Parameter((D, F), dtype="float32")
        self.q, self.scale = op.quantize(self.w, axis=0)
        four, self.scale4 = op.quantize(self.w, 4, 16, axis=0)
        self.packed = op.pack_int4(four, axis=0)

    def plain(self, x: nn.Tensor) -> nn.Tensor:
        return op.matmul(x, self.w)

    def widened(self, x: nn.Tensor) -> nn.Tensor:
        return op.matmul(x, self.w, out_dtype="float64")

    def twice(self, x: nn.Tensor) -> nn.Tensor:
        return op.matmul(x, self.w) + op.matmul(x * 2.0, self.w)

    def transposed(self, x: nn.Tensor) -> nn.Tensor:
        return op.matmul(op.matmul(x, self.w), op.permute_dims(self.w))

    def int8(self, x: nn.Tensor) -> nn.Tensor:
        return op.matmul(x, op.dequantize(self.q, self.scale, axis=0))

    def int4(self, x: nn.Tensor) -> nn.Tensor:
        return op.matmul(x, op.dequantize(op.unpack_int4(self.packed, axis=0), self.scale4, None, 16, axis=0))

    def chosen(self, x: nn.Tensor) -> nn.Tensor:
        return op.cond(op.sum(x) > 0.0, lambda: op.matmul(x, self.w), lambda: op.matmul(x * 2.0, self.w))

    def rows(self, indices: nn.Tensor) -> nn.Tensor:
        return op.take(self.w, indices, axis=0)


METHODS = ["plain", "widened", "twice", "transposed", "int8", "int4", "chosen"]


@pytest.mark.parametrize("name", METHODS)
def test_no_product_is_left_in_the_old_order_and_results_stay_the_same(name):
    ir = lift_transform_params(Model().export({name: X}), shared_transform=True)
    new = transpose_weights(ir)
    assert "matmul(" not in str(new[name])
    expect_same_results(ir, new)
    assert first_difference(parse(str(new)), new) is None
    assert transpose_weights(new) is new
    again = lift_transform_params(new, shared_transform=True)
    # What reads a weight in both orders keeps one of them, and a view.
    assert ("permute_dims(" in str(again[name])) is (name == "transposed")
    expect_same_results(ir, again)


def test_a_weight_is_turned_once_for_all_methods_and_its_old_order_is_not_kept():
    ir = Model().export({"plain": X, "twice": X})
    lifted = lift_transform_params(transpose_weights(ir), shared_transform=True)
    assert [p.name for p in lifted["plain"].weights] == [p.name for p in lifted["twice"].weights]
    assert [p.type.shape for p in lifted["plain"].weights] == [(F, D)]


def test_a_weight_that_something_else_reads_stays_in_its_order():
    ir = Model().export({"plain": X, "rows": {"indices": spec.Tensor(["m"], "int64")}})
    lifted = lift_transform_params(transpose_weights(ir), shared_transform=True)
    assert [p.type.shape for p in lifted["plain"].weights] == [(D, F)]


@pytest.mark.parametrize(
    "text",
    [
        "def main[n](x: input float32[n, 4], w: input float32[4, 6]) -> float32[n, 6] { y: float32[n, 6] = matmul(x, w) return y }",
        "def main[n](x: input float32[n, 2, 4], w: weight float32[n, 4, 6]) -> float32[n, 2, 6] { y: float32[n, 2, 6] = matmul(x, w) return y }",
        "def main[n](x: input float32[n, 4], w: weight float32[4]) -> float32[n] { y: float32[n] = matmul(x, w) return y }",
        "def main[n](x: input float32[n, 4]) -> float32[n, 6] { w: float32[4, 6] = ones(shape=(4, 6)) y: float32[n, 6] = matmul(x, w) return y }",
    ],
    ids=["an input", "one for each of a batch", "a vector", "a constant"],
)
def test_what_is_left_as_it_is(text):
    ir = module(text)
    assert transpose_weights(ir) is ir


@pytest.mark.parametrize("name", ["plain", "twice", "transposed"])
def test_quantising_takes_a_product_in_the_other_order_for_one_with_the_transpose(name):
    ir = Model().export({name: X})
    quantized = quantize_weights(ir, "int8")
    assert "matmul(" not in str(quantized[name])
    held = lift_transform_params(quantized, shared_transform=True)[name].weights
    assert {p.type.dtype for p in held} == {"int8", "float32"}
    products = 2 if name == "transposed" else 1  # both orders of one weight are two
    assert [p.type.dtype for p in held].count("int8") == products


def test_quantising_stores_a_table_in_both_orders_only_if_that_is_less():
    model = Model()
    specs = {"plain": X, "rows": {"indices": spec.Tensor(["m"], "int64")}}
    (table,) = (w for w in quantize_weights.report(model.export(specs), "int8").weights if w.name == "w")
    assert (table.stored, table.bytes_after) == ("int8", 2 * 32 * 48 + 4 * (32 + 48))
    model.to("bfloat16")
    half = model.export({"plain": {"x": spec.Tensor(["n", 32], "bfloat16")}, "rows": specs["rows"]})
    (table,) = (w for w in quantize_weights.report(half, "int8").weights if w.name == "w")
    assert (table.stored, table.reason) == ("keep", "would take no fewer bytes")
