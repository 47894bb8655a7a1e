# SPDX-License-Identifier: Apache-2.0
"""A module that has a transform already: new formulas over its results join it, and what moved before moves again."""

from __future__ import annotations

import pytest
from lift_checks import check_lift
from pass_checks import expect, expect_same_results, module

from nnfront.errors import PassError
from nnfront.ir import first_difference
from nnfront.passes import lift_transform_params

LIFTED = """
transform def transform_params(q: weight int8[4, 4], b: weight float32[4]) -> {{b: float32[4], w: float32[4, 4]}} {{
    w: float32[4, 4] = astype(q, dtype="float32")
    results: {{b: float32[4], w: float32[4, 4]}} = {{b: b, w: w}}
    return results
}}
def decode(x: input float32[2, 4], b: transformed float32[4], w: transformed float32[4, 4]) -> float32[2, 4]
        attrs(transform="transform_params"{declared}) {{
    {packed}
    y: float32[2, 4] = linear(x, {name}, b)
    return y
}}
def prefill(x: input float32[2, 4], w: transformed float32[4, 4]) -> float32[2, 4] attrs(transform="transform_params"{declared}) {{
    {packed}
    y: float32[2, 4] = linear(x, {name}, None)
    return y
}}
"""
PLAIN = LIFTED.format(declared="", packed="", name="w")
PACKED = LIFTED.format(
    declared=', derived=("packed",)', packed="packed: float32[4, 4] = multiply(w, 3.0)", name="packed"
)


@pytest.mark.parametrize("mode", [False, True, ["decode", "prefill"]], ids=str)
def test_a_transform_stays_as_it_is_though_it_grew(mode):
    ir = module(PLAIN)
    assert first_difference(lift_transform_params(ir, shared_transform=mode), ir) is None


@pytest.mark.parametrize("mode", [False, True], ids=str)
def test_formulas_over_lifted_values_join_those_below_them(mode):
    ir = module(PACKED)
    lifted = lift_transform_params(ir, shared_transform=mode)
    expect(
        lifted,
        """
        transform def transform_params(q: weight int8[4, 4], b: weight float32[4]) -> {b: float32[4], packed: float32[4, 4]}
                attrs(derived=("packed",)) {
            w: float32[4, 4] = astype(q, dtype="float32")
            packed: float32[4, 4] = multiply(w, 3.0)
            results: {b: float32[4], packed: float32[4, 4]} = {b: b, packed: packed}
            return results
        }
        def decode(x: input float32[2, 4], b: transformed float32[4], packed: transformed float32[4, 4]) -> float32[2, 4]
                attrs(transform="transform_params") {
            y: float32[2, 4] = linear(x, packed, b)
            return y
        }
        def prefill(x: input float32[2, 4], packed: transformed float32[4, 4]) -> float32[2, 4] attrs(transform="transform_params") {
            y: float32[2, 4] = linear(x, packed, None)
            return y
        }
        """,
    )
    expect_same_results(ir, lifted)


def test_transforms_of_single_functions_become_one():
    text = "".join(
        f"""
        def {name}(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {{
            t: float32[4, 4] = permute_dims(w, axes=(1, 0))
            y: float32[4, 4] = {op}(x, t)
            return y
        }}
        """
        for name, op in (("one", "matmul"), ("two", "add"))
    )
    ir = module(text)
    apart = lift_transform_params(ir)
    together = lift_transform_params(apart, shared_transform=True)
    assert list(apart) == ["one_transform_params", "one", "two_transform_params", "two"]
    assert first_difference(together, lift_transform_params(ir, shared_transform=True)) is None
    expect_same_results(ir, together)


def test_a_function_joins_the_transform_of_others():
    text = """
    def one(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {
        t: float32[4, 4] = permute_dims(w, axes=(1, 0))
        y: float32[4, 4] = matmul(x, t)
        return y
    }
    def two(x: input float32[4, 4], w: weight float32[4, 4], v: weight float32[4]) -> float32[4, 4] {
        t: float32[4, 4] = permute_dims(w, axes=(1, 0))
        u: float32[4] = add(v, 1.0)
        h: float32[4, 4] = matmul(x, t)
        y: float32[4, 4] = add(h, u)
        return y
    }
    """
    ir = module(text)
    first = lift_transform_params(ir, shared_transform=["one"])
    both = lift_transform_params(first, shared_transform=True)
    assert first_difference(both, lift_transform_params(ir, shared_transform=True)) is None
    expect_same_results(ir, first)


def test_a_second_list_gets_a_transform_of_its_own():
    text = "".join(
        f"def {name}(w: weight float32[4]) -> float32[4] {{ y: float32[4] = add(w, 1.0) return y }}"
        for name in ("one", "two")
    )
    first = lift_transform_params(module(text), shared_transform=["one"])
    second = lift_transform_params(first, shared_transform=["two"])
    assert list(second) == ["transform_params", "one", "transform_params_1", "two"]


def test_a_value_that_was_lifted_under_a_size_of_its_own_composes():
    check_lift(
        """
        transform def t[fresh size](w: weight float32[size]) -> {v: float32[size]} {
            v: float32[size] = add(w, 1.0)
            results: {v: float32[size]} = {v: v}
            return results
        }
        def main[m, n](x: input float32[m, n], v: transformed float32[m*n]) -> float32[m, n] attrs(transform="t") {
            u: float32[m*n] = multiply(v, 2.0)
            r: float32[m, n] = reshape(u, shape=(m, n))
            y: float32[m, n] = add(x, r)
            return y
        }
        """,
        """
        transform def t[fresh size](w: weight float32[size]) -> {u: float32[size]} {
            v: float32[size] = add(w, 1.0)
            u: float32[size] = multiply(v, 2.0)
            results: {u: float32[size]} = {u: u}
            return results
        }
        def main[m, n](x: input float32[m, n], u: transformed float32[m*n]) -> float32[m, n] attrs(transform="t") {
            r: float32[m, n] = reshape(u, shape=(m, n))
            y: float32[m, n] = add(x, r)
            return y
        }
        """,
        dims={"m": 2, "n": 3, "size": 6},
    )


def test_a_transform_that_does_more_than_compute_from_weights_is_an_error():
    ir = module(
        """
        transform def t(w: weight float32[4]) -> {s: float32[4]} {
            s: float32[4] = stop_lift_params(w)
            results: {s: float32[4]} = {s: s}
            return results
        }
        def main(x: input float32[4], s: transformed float32[4]) -> float32[4] attrs(transform="t") {
            y: float32[4] = add(x, s)
            return y
        }
        """
    )
    with pytest.raises(PassError) as caught:
        lift_transform_params(ir)
    assert str(caught.value) == (
        "t is not a function of weights alone that returns named results\n"
        "  s: stop_lift_params keeps it\n"
        "  help: a transform has weight parameters only, and ops without effects"
    )
