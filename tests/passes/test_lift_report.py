# SPDX-License-Identifier: Apache-2.0
"""The report says what moves, its bytes and who declared it, what stays and why, and the bytes in memory."""

from __future__ import annotations

import pytest
from pass_checks import module

from nnfront.passes import lift_transform_params

TEXT = """
private def layer(x: input float32[4, 4], up: weight float32[4, 4]) -> float32[4, 4] {
    s: float32[4, 4] = stop_lift_params(up)  # at mlp
    t: float32[4, 4] = permute_dims(s, axes=(1, 0))  # at mlp
    y: float32[4, 4] = matmul(x, t)
    return y
}
def decode(x: input float32[4, 4], q: weight int8[4, 4], k: weight float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4]
        attrs(derived=("model.kk",)) {
    model.kk: float32[8, 4] = concat(k, k)  # at model
    h: float32[4, 8] = linear(x, model.kk, None)
    wide: float32[4, 4] = astype(q, dtype="float32")
    i: float32[4, 4] = matmul(x, wide)
    w_t: float32[4, 4] = permute_dims(w, axes=(1, 0))
    j: float32[4, 4] = matmul(i, w_t)
    l: float32[4, 4] = @layer(j, k)  # at model.layers.0
    hs: float32[] = sum(h)
    y: float32[4, 4] = add(l, hs)
    return y
}
def prefill(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {
    w_t: float32[4, 4] = permute_dims(w, axes=(1, 0))
    y: float32[4, 4] = matmul(x, w_t)
    return y
}
"""


def test_report_of_a_shared_transform():
    assert str(lift_transform_params.report(module(TEXT), shared_transform=True)) == (
        "transform_params, for decode, prefill: 144 bytes of weights, 272 kept\n"
        "  as they are: 2 weights\n"
        "  moved: model.kk float32[8, 4], 128 bytes, declared in model, for decode\n"
        "  moved: w_t float32[4, 4], 64 bytes, for decode, prefill\n"
        "  stayed: wide, in decode: moving it and what goes with it would take 48 more bytes\n"
        "  stayed: model.layers.0.s, in decode: stop_lift_params keeps it"
    )


def test_report_has_the_numbers():
    report = lift_transform_params.report(module(TEXT), shared_transform=["prefill"])
    (transform,) = report.transforms
    assert (transform.bytes_before, transform.bytes_after) == (64, 64)
    assert [m.name for m in transform.moved] == ["w_t"]
    assert transform.passed == ()


def test_a_view_of_what_stays_anyway_takes_no_bytes():
    ir = module(
        """
        def main(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] attrs(derived=("w_t",)) {
            w_t: float32[4, 4] = permute_dims(w, axes=(1, 0))
            y: float32[4, 4] = matmul(x, w_t)
            z: float32[4, 4] = matmul(y, w)
            return z
        }
        """
    )
    (transform,) = lift_transform_params.report(ir).transforms
    assert [(m.name, m.size_bytes) for m in transform.moved] == [("w_t", 0)]
    assert (transform.bytes_before, transform.bytes_after) == (64, 64)


def test_report_of_a_module_without_weights():
    ir = module("def main(x: input float32[4]) -> float32[4] { return x }")
    assert str(lift_transform_params.report(ir)) == "no function has weights"
    assert lift_transform_params(ir) is ir


@pytest.mark.parametrize("kind", ["external", "fused"])
def test_what_a_primitive_function_computes_stays(kind):
    ir = module(
        f"""
        {kind} def k(w: input float32[4, 4]) -> float32[4, 4] {{
            r: float32[4, 4] = tanh(w)
            return r
        }}
        def a(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {{
            t: float32[4, 4] = @k(w)
            y: float32[4, 4] = matmul(x, t)
            return y
        }}
        """
    )
    assert str(lift_transform_params.report(ir)) == (
        "a_transform_params, for a: 64 bytes of weights, 64 kept\n"
        "  as they are: 1 weights\n"
        f"  stayed: t, in a: k is {kind}, and its calls are left as they are"
    )
    assert [p.name for p in lift_transform_params(ir)["a"].weights] == ["w"]
