# SPDX-License-Identifier: Apache-2.0
"""Binding dims and parameters: the same results for the values bound, and refusals of values that cannot be."""

from __future__ import annotations

import pytest
import torch
from pass_checks import expect, module
from pass_evaluator import run_method

from nnfront.errors import PassError
from nnfront.passes import bind_dims, bind_params, lift_transform_params

TEXT = """
private def layer[n](x: input float32[n, 4], w: weight float32[4, 4]) -> float32[n, 4] {
    y: float32[n, 4] = linear(x, w, None)
    return y
}
def prefill[batch: 1..8, seq: % 2](x: input float32[batch, seq, 4], w: weight float32[4, 4]) -> float32[batch*seq, 4] {
    flat: float32[batch*seq, 4] = reshape(x, shape=(batch*seq, 4))
    y: float32[batch*seq, 4] = @layer(flat, w)
    return y
}
def decode[batch](x: input float32[batch, 4], count: input int64(batch), w: weight float32[4, 4]) -> float32[batch, 4] {
    z: float32[batch, 4] = zeros(shape=(batch, 4))
    y: float32[batch, 4] = add(x, z)
    return y
}
"""


def test_a_bound_dim_is_a_number_everywhere_in_the_function():
    after = bind_dims(module(TEXT), {"batch": 2}, ["decode"])
    assert "batch" not in str(after["decode"])
    assert after["prefill"] == module(TEXT)["prefill"]


def test_a_dim_may_be_bound_to_another_size():
    after = bind_dims(module(TEXT), {"seq": "2*half"})
    assert [s.name for s in after["prefill"].symbols] == ["batch", "half"]
    assert str(after["prefill"].result_type.shape[0]) == "2*batch*half"


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("rows", "rows: 2..9 % 2"),
        ("2*rows", "rows: 1..4"),
        ("rows + 1", "rows: 1..8"),
        ("3*rows + 2", "rows: 0..2 % 2"),
    ],
)
def test_a_dim_under_another_name_keeps_what_is_known_of_it(size, expected):
    ir = module("def main[n: 2..9 % 2](x: input float32[n]) -> float32[n] { return x }")
    assert str(bind_dims(ir, {"n": size})).startswith(f"def main[{expected}](")


def test_results_are_those_of_the_general_function():
    ir = module(TEXT)
    after = bind_dims(ir, {"batch": 3, "seq": 4})
    x, w = torch.randn(3, 4, 4), torch.randn(4, 4)
    expected = run_method(ir, "prefill", {"x": x}, {"w": w})
    torch.testing.assert_close(run_method(after, "prefill", {"x": x}, {"w": w}), expected)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"batch": 9}, "dim 'batch' of prefill cannot be 9\n  batch is between 1 and 8"),
        ({"seq": 3}, "dim 'seq' of prefill cannot be 3\n  seq is at least 0, a multiple of 2"),
        ({"sequence": 3}, "no function has a dim 'sequence'\n  the dims of prefill, decode are batch, seq"),
    ],
    ids=["out of range", "not a multiple", "unknown"],
)
def test_a_size_that_a_dim_cannot_be_is_refused(dims, message):
    with pytest.raises(PassError) as caught:
        bind_dims(module(TEXT), dims)
    assert str(caught.value) == message


def test_an_op_that_is_not_defined_for_the_size_is_named():
    ir = module(
        """
        def main[n, m](x: input float32[n, m], i: input int64(n)) -> float32[m] {
            y: float32[m] = getitem(x, index=(0,))
            return y
        }
        """
    )
    with pytest.raises(
        PassError, match=r"^main cannot have n = 0: getitem: position 0 is outside axis 0 of size 0"
    ):
        bind_dims(ir, {"n": 0})


def test_a_function_that_is_not_public_is_refused():
    with pytest.raises(PassError) as caught:
        bind_dims(module(TEXT), {"n": 1}, ["layer"])
    assert str(caught.value) == "there is no public function 'layer'\n  public functions are prefill, decode"


def test_a_transform_is_bound_with_its_methods():
    ir = lift_transform_params(
        module(
            """
            def main[b, n](x: input float32[b, n], w: weight float32[4, n]) -> float32[b, 4] {
                t: float32[n, 4] = permute_dims(w, axes=(1, 0))
                y: float32[b, 4] = matmul(x, t)
                return y
            }
            """
        )
    )
    after = bind_dims(ir, {"n": 3})
    assert "n" not in {s.name for f in after.functions for s in f.symbols}
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    torch.testing.assert_close(run_method(after, "main", {"x": x}, {"w": w}), x @ w.T)


def test_a_bound_parameter_goes_from_every_function_that_has_it():
    w = torch.randn(4, 4)
    ir = module(TEXT)
    after = bind_params(ir, {"w": w})
    assert [p.name for f in after.methods for p in f.params] == ["x", "x", "count"]
    x = torch.randn(2, 2, 4)
    expected = run_method(ir, "prefill", {"x": x}, {"w": w})
    torch.testing.assert_close(run_method(after, "prefill", {"x": x}, {}), expected)


def test_a_number_binds_the_dim_that_it_stands_for():
    after = bind_params(module(TEXT), {"count": 5}, ["decode"])
    expect(
        after.with_functions([after["decode"]]),
        """
        def decode(x: input float32[5, 4], w: weight float32[4, 4]) -> float32[5, 4] {
            z: float32[5, 4] = zeros(shape=(5, 4))
            y: float32[5, 4] = add(x, z)
            return y
        }
        """,
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"v": 1}, "no function has a parameter 'v'\n  the parameters of decode are x, count, w"),
        (
            {"w": torch.zeros(4, 4, dtype=torch.float16)},
            "the value for 'w' does not fit decode\n"
            "  got a Tensor of shape (4, 4) and dtype torch.float16\n  expected float32[4, 4]",
        ),
        (
            {"w": [1.0, 2.0]},
            "the value for 'w' does not fit decode\n  got a list [1.0, 2.0]\n  expected float32[4, 4]",
        ),
        (
            {"count": 1.5},
            "the value for 'count' does not fit decode\n  got a float 1.5\n  expected int64(batch)",
        ),
        ({"w": [[0.0] * 4]}, "the values for w do not fit decode: '4' cannot be 1"),
        (
            {"x": [[0.0] * 4], "count": 2},
            "the values for x, count do not fit decode: 'batch' cannot be 2\n  batch is 1",
        ),
    ],
    ids=["unknown", "dtype", "axes", "kind", "size", "two sizes"],
)
def test_a_value_that_does_not_fit_is_refused(params, message):
    with pytest.raises(PassError) as caught:
        bind_params(module(TEXT), params, ["decode"])
    assert str(caught.value) == message
