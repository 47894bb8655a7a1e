# SPDX-License-Identifier: Apache-2.0
"""Folding constants, sharing equal values, removing dead code: where each applies and where it does not."""

from __future__ import annotations

import base64

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_checks import expect_same_results, module
from random_modules import modules
from rewrite_checks import check, main

from nnfront.ir import Constant, first_difference, verify
from nnfront.ops.constants import constant, value_of
from nnfront.passes import (
    PIPELINES,
    canonicalize,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    fold_constants,
    inline,
    run,
)

STEPS = {step.name: step for step in (*PIPELINES["simplify"], inline)}


@pytest.mark.parametrize("name", STEPS)
def test_results_stay_the_same(name):
    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(modules())
    def check_one(ir):
        after = STEPS[name](ir)
        verify(after)
        expect_same_results(ir, after)
        assert first_difference(STEPS[name](after), after) is None

    check_one()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(modules(), st.permutations(sorted(STEPS)))
def test_passes_work_in_any_order(ir, order):
    expect_same_results(ir, run(ir, [STEPS[name] for name in order]))


# Folding.


def test_a_large_result_is_not_folded():
    check(
        fold_constants,
        main(
            "a: float32[4, 8] = ones(shape=(4, 8)) y: float32[4, 8] = add(a, 1.0) return y",
            result="float32[4, 8]",
        ),
    )


def test_a_result_no_larger_than_its_constants_is_folded():
    data = torch.arange(32, dtype=torch.float32)
    text = f'const(float32[32], "{base64.b64encode(data.numpy().tobytes()).decode()}")'
    result = fold_constants(module(main(f"a: float32[32] = add({text}, 1.0) return a", result="float32[32]")))
    assert isinstance(result["main"].result, Constant)
    torch.testing.assert_close(value_of(result["main"].result), data + 1)


@pytest.mark.parametrize(
    "body",
    [
        "a: float32[] = stop_lift_params(const(float32[], [1.0])) y: float32[4, 4] = add(x, a) return y",
        "p: () = print_(const(float32[], [1.0])) y: float32[4, 4] = add(x, 1.0) return y",
        "a: int64[] = floor_divide(const(int64[], [1]), const(int64[], [0])) y: float32[4, 4] = add(x, a) return y",
    ],
    ids=["a marker", "an effect", "a division by zero"],
)
def test_some_calls_over_constants_stay(body):
    ir = module(main(body))
    assert fold_constants(ir) is ir


def test_a_size_that_is_a_dim_is_not_folded():
    check(
        fold_constants,
        main(
            "a: float32[n] = ones(shape=(n,)) y: float32[n] = add(x, a) return y",
            "x: input float32[n]",
            "float32[n]",
            "[n]",
        ),
    )


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn"]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 2)], ids=str)
def test_constants_are_tensors_and_back(dtype, shape):
    data = torch.randint(0, 2, shape).to(getattr(torch, dtype))
    back = value_of(constant(data))
    assert back.dtype == data.dtype
    assert back.shape == data.shape
    assert torch.equal(back.float(), data.float())


# Sharing.


def test_equal_calls_are_shared_through_their_operands():
    check(
        eliminate_common_subexpressions,
        main(
            """
            a: float32[4, 4] = exp(x)
            b: float32[4, 4] = add(a, 1.0)
            c: float32[4, 4] = exp(x)
            d: float32[4, 4] = add(c, 1.0)
            y: float32[4, 4] = matmul(b, d)
            return y
            """
        ),
        main(
            """
            a: float32[4, 4] = exp(x)
            b: float32[4, 4] = add(a, 1.0)
            y: float32[4, 4] = matmul(b, b)
            return y
            """
        ),
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("add(x, 1.0)", "add(x, 1)"),
        ("add(x, 0.0)", "add(x, -0.0)"),
        ("add(x, True)", "add(x, 1)"),
        ("sum(x, axis=(0,), keepdims=True)", "sum(x, axis=(1,), keepdims=True)"),
        ("subtract(x, a)", "subtract(a, x)"),
        ("maximum(x, nan)", "maximum(x, 0.0)"),
    ],
)
def test_what_only_looks_equal_is_not_shared(one, other):
    type = {"sum(x, axis=(0,), keepdims=True)": ("float32[1, 4]", "float32[4, 1]")}.get(
        one, ("float32[4, 4]",) * 2
    )
    body = f"a: float32[4, 4] = exp(x) p: {type[0]} = {one} q: {type[1]} = {other} y: float32[4, 4] = subtract(p, q) return y"
    check(eliminate_common_subexpressions, main(body))


def test_nan_is_shared_with_nan():
    after = eliminate_common_subexpressions(
        module(
            main(
                "p: float32[4, 4] = maximum(x, nan) q: float32[4, 4] = maximum(x, nan) y: float32[4, 4] = add(p, q) return y"
            )
        )
    )
    assert len(after["main"].bindings) == 2


def test_a_value_of_one_branch_is_not_one_of_the_other():
    check(
        eliminate_common_subexpressions,
        main(
            """
            y: float32[4, 4] = if flag {
                a: float32[4, 4] = exp(x)
                b: float32[4, 4] = exp(x)
                c: float32[4, 4] = add(a, b)
                yield c
            } else {
                d: float32[4, 4] = exp(x)
                yield d
            }
            e: float32[4, 4] = exp(x)
            z: float32[4, 4] = add(y, e)
            return z
            """,
            "x: input float32[4, 4], flag: input bool",
        ),
        main(
            """
            y: float32[4, 4] = if flag {
                a: float32[4, 4] = exp(x)
                c: float32[4, 4] = add(a, a)
                yield c
            } else {
                d: float32[4, 4] = exp(x)
                yield d
            }
            e: float32[4, 4] = exp(x)
            z: float32[4, 4] = add(y, e)
            return z
            """,
            "x: input float32[4, 4], flag: input bool",
        ),
    )


def test_calls_of_functions_are_shared_unless_they_have_an_effect(capsys):
    functions = """
    private def quiet(x: input float32[4, 4]) -> float32[4, 4] { y: float32[4, 4] = exp(x) return y }
    private def loud(x: input float32[4, 4]) -> float32[4, 4] { p: () = print_(x) return x }
    """
    ir = module(
        functions
        + main(
            """
            a: float32[4, 4] = @quiet(x)
            b: float32[4, 4] = @quiet(x)
            c: float32[4, 4] = @loud(a)
            d: float32[4, 4] = @loud(b)
            y: float32[4, 4] = add(c, d)
            return y
            """
        )
    )
    after = eliminate_common_subexpressions(ir)
    assert [b.value.function for b in after["main"].bindings[:-1]] == ["quiet", "loud", "loud"]
    expect_same_results(ir, after)
    assert capsys.readouterr().out.count("tensor") == 4


# Dead code.


def test_a_chain_that_nobody_reads_goes():
    check(
        eliminate_dead_code,
        main("a: float32[4, 4] = exp(x) b: float32[4, 4] = tanh(a) y: float32[4, 4] = add(x, 1.0) return y"),
        main("y: float32[4, 4] = add(x, 1.0) return y"),
    )


def test_dead_code_in_branches_goes_and_so_does_a_branch_that_nobody_reads():
    check(
        eliminate_dead_code,
        main(
            """
            dead: float32[4, 4] = if flag {
                yield x
            } else {
                o: float32[4, 4] = exp(x)
                yield o
            }
            y: float32[4, 4] = if flag {
                a: float32[4, 4] = exp(x)
                b: float32[4, 4] = exp(a)
                yield a
            } else {
                yield x
            }
            return y
            """,
            "x: input float32[4, 4], flag: input bool",
        ),
        main(
            """
            y: float32[4, 4] = if flag {
                a: float32[4, 4] = exp(x)
                yield a
            } else {
                yield x
            }
            return y
            """,
            "x: input float32[4, 4], flag: input bool",
        ),
    )


def test_effects_stay_wherever_they_are(capsys):
    text = """
    private def loud(x: input float32[4, 4]) -> float32[4, 4] { p: () = print_(x) return x }
    private def louder(x: input float32[4, 4]) -> float32[4, 4] { y: float32[4, 4] = @loud(x) return x }
    """ + main(
        """
        a: float32[4, 4] = @louder(x)
        b: float32[4, 4] = if True { p: () = print_(x) yield x } else { yield x }
        return x
        """
    )
    ir = module(text)
    assert eliminate_dead_code(ir) is ir


def test_a_write_of_a_cache_stays_though_nobody_reads_it():
    layer = "layer(kv_heads=1, head_size=4, dtype=float32, batch=b, max_seq=m)"
    ir = module(
        f"""
        def main[b, s, m](q: input float32[b, s, 1, 4], cache: state {layer}) -> (float32[b, s, 1, 4], {layer}) {{
            a: (float32[b, s, 1, 4], {layer}) = attention(q, q, q, cache)
            written: {layer} = a[1]
            r: (float32[b, s, 1, 4], {layer}) = (q, written)
            return r
        }}
        """
    )
    assert eliminate_dead_code(ir) is ir


def test_functions_that_nothing_reaches_go_and_transforms_of_methods_stay():
    text = """
    private def inner(x: input float32[4]) -> float32[4] { return x }
    private def a(x: input float32[4]) -> float32[4] { y: float32[4] = @inner(x) return y }
    fused def k(x: input float32[4]) -> float32[4] { y: float32[4] = @used_by_k(x) return y }
    private def used_by_k(x: input float32[4]) -> float32[4] { return x }
    fused def unused(x: input float32[4]) -> float32[4] { return x }
    external def plugin(x: input float32[4]) -> float32[4] { return x }
    transform def t(w: weight float32[4]) -> {w: float32[4]} { r: {w: float32[4]} = {w: w} return r }
    transform def old(w: weight float32[4]) -> {w: float32[4]} { r: {w: float32[4]} = {w: w} return r }
    def main(x: input float32[4], w: transformed float32[4]) -> float32[4] attrs(transform="t") {
        y: float32[4] = @k(x)
        return y
    }
    """
    ir = module(text)
    after = eliminate_dead_code(ir)
    assert list(after) == ["k", "used_by_k", "plugin", "t", "main"]
    assert after["k"] is ir["k"]
    expect_same_results(ir, after)


def test_canonical_form_is_kept_by_a_second_run_of_the_pipeline():
    ir = run(
        module(
            main(
                "a: float32[4, 4] = x b: float32[4, 4] = reshape(a, shape=(4, 4)) y: float32[4, 4] = exp(b) return y"
            )
        ),
        "simplify",
    )
    assert canonicalize(ir) is ir
    assert run(ir, "simplify") is ir
