# SPDX-License-Identifier: Apache-2.0
"""Cases on the dims of weights: lifting before them and after them moves the same, and both hold for every size."""

from __future__ import annotations

import pytest
import torch
from few_of import few_of
from pass_checks import module
from pass_evaluator import run_method

import nnfront as nn
from nnfront.errors import PassError
from nnfront.ir import IRModule, first_difference, verify
from nnfront.passes import lift_transform_params, run, special_cases

TRANSPOSED = """
def main[n, d](x: input float32[n, d], w: weight float32[d, 4]) -> float32[n, d] {
    t: float32[4, d] = permute_dims(w, axes=(1, 0))
    u: float32[d, 4] = permute_dims(t, axes=(1, 0))
    v: float32[d, 4] = exp(u)
    s: float32[4, d] = permute_dims(v, axes=(1, 0))
    y: float32[n, 4] = matmul(x, u)
    z: float32[n, d] = matmul(y, s)
    return z
}
"""
RESHAPED = """
def main[n, d](x: input float32[n, d], w: weight float32[d, 4]) -> float32[n, d] {
    flat: float32[4*d] = reshape(w, shape=(4*d,))
    ones: float32[4*d] = ones(shape=(4*d,))
    sum: float32[4*d] = add(flat, ones)
    t: float32[4, d] = reshape(sum, shape=(4, d))
    s: float32[d] = sum(t, axis=(0,))
    z: float32[n, d] = multiply(x, s)
    return z
}
"""
LAYERS = """
private def layer[k, m](x: input float32[m, k], w: weight float32[k, 4]) -> float32[m, k] {
    flat: float32[4*k] = reshape(w, shape=(4*k,))
    t: float32[4, k] = reshape(flat, shape=(4, k))
    y: float32[m, 4] = matmul(x, w)
    z: float32[m, k] = matmul(y, t)
    return z
}
def main[n, d](x: input float32[n, d], w: weight float32[d, 4], v: weight float32[d, 4]) -> float32[n, d] {
    a: float32[n, d] = @layer(x, w)  # at layers.0
    b: float32[n, d] = @layer(a, v)  # at layers.1
    return b
}
"""
COUNTED = """
def main[n, d: 1..](x: input float32[n, d], w: weight float32[d, 4]) -> float32[n, d] {
    c: bool = within(dim(d), ranges=((3, 3, None),))
    u: float32[d, 4] = if c {
        f: float32[12] = reshape(w, shape=(12,))
        g: float32[3, 4] = reshape(f, shape=(3, 4))
        h: float32[3, 4] = multiply(g, 2.0)
        yield h
    } else {
        i: float32[d, 4] = multiply(w, 2.0)
        yield i
    }
    s: float32[d] = sum(u, axis=(1,))
    z: float32[n, d] = multiply(x, s)
    return z
}
"""


def expect_same_at_every_size(ir: IRModule, after: IRModule) -> None:
    """Check results by the reference and in a session, whatever size the weights have."""
    verify(after)
    executable = nn.compile(after)
    for d in (1, 3, 4, 6):
        weights = {p.name: torch.randn(d, 4) for p in ir["main"].weights}
        for n in (1, 2):
            x = torch.randn(n, d)
            expected = run_method(ir, "main", {"x": x}, weights)
            torch.testing.assert_close(run_method(after, "main", {"x": x}, weights), expected)
            torch.testing.assert_close(executable.load(weights)["main"](x), expected)


CASES = [[{"d": 3}], [{"d": (2, 4)}], [{"d": nn.multiple_of(3)}, {"n": 1, "d": 4}], [{"n": 1}]]


@pytest.mark.parametrize("text", [TRANSPOSED, RESHAPED, LAYERS], ids=["transposed", "reshaped", "layers"])
@pytest.mark.parametrize(
    "cases", few_of(CASES, 2), ids=["a number", "a range", "a multiple and a number", "another dim"]
)
@pytest.mark.parametrize("allow_growth", few_of([True, False]))
def test_lifting_before_the_cases_moves_what_lifting_after_them_does(text, cases, allow_growth):
    ir = module(text)
    lifted = lift_transform_params(ir, allow_growth=allow_growth)
    after = special_cases(lifted, "main", cases)
    before = lift_transform_params(special_cases(ir, "main", cases), allow_growth=allow_growth)
    for each in (after, before):
        expect_same_at_every_size(ir, each)
    (first, second) = ([f for f in each.functions if f.kind == "transform"] for each in (before, after))
    assert list(map(str, first)) == list(map(str, second))
    assert [str(p.type) for p in before["main"].params] == [str(p.type) for p in after["main"].params]
    assert first_difference(lift_transform_params(before, allow_growth=allow_growth), before) is None


def test_what_is_defined_in_a_case_only_is_not_moved():
    lifted = lift_transform_params(module(COUNTED), allow_growth=True)
    expect_same_at_every_size(module(COUNTED), lifted)
    assert "reshape" not in str(lifted["main_transform_params"])
    for cases in CASES:  # a variant may know which branch it takes, so that more of it can move than before
        expect_same_at_every_size(
            module(COUNTED),
            lift_transform_params(special_cases(module(COUNTED), "main", cases), allow_growth=True),
        )
        expect_same_at_every_size(module(COUNTED), special_cases(lifted, "main", cases))
    report = str(lift_transform_params.report(module(COUNTED), allow_growth=True))
    assert "stayed: f, in main: it is defined in a special case only" in report


SUMMED = """
def main[n, d](x: input float32[n, 4], w: weight float32[d, 4]) -> float32[n, 4] attrs(special_cases=({d: 3}, {n: 1})) {
    t: float32[4] = sum(w, axis=(0,))
    z: float32[n, 4] = multiply(x, t)
    return z
}
"""


def test_a_declared_case_keeps_the_dim_of_a_weight_that_nothing_else_needs():
    ir = module(SUMMED)
    lifted = lift_transform_params(ir, allow_growth=True)
    again = lift_transform_params(lifted, allow_growth=True)
    after = lift_transform_params(special_cases(ir), allow_growth=True)
    for each in (lifted, run(lifted, "simplify"), again, after):
        verify(each)
        assert [p.name for p in each["main"].params] == ["x", "d", "t"]
        for d in (3, 5):
            session = nn.compile(each).load({"w": torch.ones(d, 4)})
            x = torch.randn(2, 4)
            torch.testing.assert_close(session["main"](x), x * d)
            assert session.hits("main") == {"d == 3": d == 3, "n == 1": 0, "general": d != 3}
            assert session.explain("main", x).taken == ("d == 3" if d == 3 else "general")


def test_a_case_on_a_dim_that_only_the_transform_needs_is_refused_by_name():
    lifted = lift_transform_params(special_cases(module(SUMMED), "main", []), allow_growth=True)
    with pytest.raises(PassError) as caught:
        special_cases(lifted, "main", [{"d": 4}])
    assert str(caught.value) == (
        "nothing that main does in a call depends on 'd'\n"
        "  it is a dim of weights that only main_transform_params needs\n"
        "  help: leave it out, or give the case before lifting"
    )
