# SPDX-License-Identifier: Apache-2.0
"""Cases on values, and what becomes of cases when dims and arguments are bound."""

from __future__ import annotations

import math

import pytest
import torch
from pass_checks import expect_same_results, module
from pass_evaluator import run_method

from nnfront.cases.conditions import causal, multiple_of, zeros
from nnfront.ir import first_difference, parse, verify
from nnfront.passes import (
    bind_dims,
    bind_params,
    canonicalize,
    eliminate_dead_code,
    inline,
    lift_transform_params,
    run,
    special_cases,
)

ATTEND = """
def main[b, q: 1..64, k: 1..64](x: input float32[b, q, 2, 4], y: input float32[b, k, 2, 4], mask: input {dtype}[{mask}]) -> float32[b, q, 2, 4] {{
    a: float32[b, q, 2, 4] = scaled_dot_product_attention(x, y, y, mask)
    return a
}}
"""
SCALED = """
def main[n](x: input float32[n], scale: input {dtype}[], k: input int64, top: input float64, flag: input bool, on: input bool[]) -> float32[n] {{
    a: float32[n] = multiply(x, scale)
    b: float32[n] = add(a, k)
    c: float32[n] = multiply(b, top)
    d: float32[n] = if flag {{ e: float32[n] = relu(c) yield e }} else {{ yield c }}
    f: float32[n] = if on {{ g: float32[n] = exp(d) yield g }} else {{ yield d }}
    return f
}}
"""


def entered(ir, inputs, name="main"):
    """What the dispatch enters for these inputs, and the result."""
    found: list[str] = []
    return found, run_method(ir, name, inputs, {}, found)


def causal_mask(shape, dtype, hidden=-math.inf):
    """Query i sees keys 0 ... i, written element by element."""
    mask = torch.empty(shape, dtype=dtype)
    for i in range(shape[-2]):
        for j in range(shape[-1]):
            mask[..., i, j] = j <= i if dtype == torch.bool else 0.0 if j <= i else hidden
    return mask


@pytest.mark.parametrize("axes", ["q, k", "b, 2, q, k"])
@pytest.mark.parametrize("dtype", ["bool", "float32"])
@pytest.mark.parametrize(("q", "k"), [(4, 4), (3, 5), (5, 3), (1, 1)])
def test_the_causal_mask_is_recognised_and_becomes_an_expression(axes, dtype, q, k):
    ir = module(ATTEND.format(dtype=dtype, mask=axes))
    after = special_cases(ir, "main", [{"mask": causal}])
    verify(after)
    assert [p.name for p in after["main_case_0"].params] == ["x", "y"]
    shape = (q, k) if axes == "q, k" else (3, 2, q, k)
    mask = causal_mask(shape, getattr(torch, dtype))
    inputs = {"x": torch.randn(3, q, 2, 4), "y": torch.randn(3, k, 2, 4)}
    taken, result = entered(after, {**inputs, "mask": mask})
    assert taken == ["mask is causal"]
    torch.testing.assert_close(result, run_method(ir, "main", {**inputs, "mask": mask}, {}), equal_nan=True)
    other = mask.clone()
    other[..., -1, 0] = False if dtype == "bool" else -1.0
    assert entered(after, {**inputs, "mask": other})[0] == ["general"]


def test_a_mask_may_hide_by_another_number():
    ir = module(ATTEND.format(dtype="float32", mask="q, k"))
    after = special_cases(ir, "main", [{"mask": causal(-1e9)}])
    inputs = {"x": torch.randn(3, 4, 2, 4), "y": torch.randn(3, 4, 2, 4)}
    for hidden, expected in ((-1e9, "mask is causal(-1000000000.0)"), (-math.inf, "general")):
        mask = causal_mask((4, 4), torch.float32, hidden)
        taken, result = entered(after, {**inputs, "mask": mask})
        assert taken == [expected]
        torch.testing.assert_close(result, run_method(ir, "main", {**inputs, "mask": mask}, {}))


@pytest.mark.parametrize(
    ("dtype", "case", "attrs", "operands"),
    [
        ("bool", causal, {"is_causal": True}, 3),
        ("float32", causal, {"is_causal": True}, 3),
        ("float32", zeros, {}, 3),
    ],
)
def test_attention_under_a_known_mask_needs_none(dtype, case, attrs, operands):
    ir = special_cases(module(ATTEND.format(dtype=dtype, mask="b, 2, q, k")), "main", [{"mask": case}])
    after = eliminate_dead_code(canonicalize(ir))
    expect_same_results(ir, after, {"q": 5, "k": 3})
    (binding,) = after["main_case_0"].bindings
    assert sum(arg is not None for arg in binding.value.args) == operands
    assert dict(binding.value.attrs) == attrs


@pytest.mark.parametrize(
    ("dtype", "case"), [("bool", zeros), ("float32", causal(-5.0))], ids=["nothing is seen", "another number"]
)
def test_attention_under_another_mask_keeps_it(dtype, case):
    ir = special_cases(module(ATTEND.format(dtype=dtype, mask="q, k")), "main", [{"mask": case}])
    after = eliminate_dead_code(canonicalize(ir))
    assert after["main_case_0"].bindings[-1].value.args[3] is not None


SCALARS = [{"scale": 0.1}, {"k": 2, "flag": True}, {"top": 1}, {"on": False}]


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize(
    ("scale", "k", "top", "flag", "on", "case"),
    [
        (0.1, 2, 1.0, True, False, "scale == 0.1"),
        (0.2, 2, 1.0, True, False, "k == 2 and flag == True"),
        (0.2, 2, 1.0, False, False, "top == 1"),
        (0.2, 3, 0.5, True, False, "on == False"),
        (0.2, 3, 0.5, True, True, "general"),
    ],
)
def test_scalars_of_all_kinds_are_compared_and_become_literals(dtype, scale, k, top, flag, on, case):
    ir = module(SCALED.format(dtype=dtype).replace("float32[n]", f"{dtype}[n]"))
    after = special_cases(ir, "main", SCALARS)
    verify(after)
    made = getattr(torch, dtype)
    inputs = {
        "x": torch.randn(3).to(made),
        "scale": torch.tensor(scale, dtype=made),
        "k": k,
        "top": top,
        "flag": flag,
        "on": torch.tensor(on),
    }
    taken, result = entered(after, inputs)
    assert taken == [case]
    torch.testing.assert_close(result, run_method(ir, "main", inputs, {}))
    assert [p.name for p in after["main_case_1"].params] == ["x", "scale", "top", "on"]


def test_tensors_are_read_only_where_the_numbers_are_right():
    ir = special_cases(module(ATTEND.format(dtype="float32", mask="q, k")), "main", [{"b": 2, "mask": zeros}])
    choice = ir["main"].bindings[1].value
    assert [b.value.op.name for b in ir["main"].bindings[:1]] == ["within"]
    assert [b.value.op.name for b in choice.then.bindings] == ["not_equal", "any", "within"]
    assert choice.otherwise.bindings == ()


DIMS = """
def main[a: 1..64, b: 1..64](x: input float32[a, b], mask: input float32[a]) -> float32[a, b] {
    c: float32[a, 1] = unsqueeze(mask, dim=1)
    y: float32[a, b] = add(x, c)
    return y
}
"""


# Binding after the dispatch is there.


def test_binding_a_dim_decides_the_dispatch():
    ir = special_cases(module(DIMS), "main", [{"a": 4}, {"a": (5, 8), "b": 2}, {"b": 3}])
    four = bind_dims(ir, {"a": 4})
    expect_same_results(bind_dims(module(DIMS), {"a": 4}), four)
    assert "main_general" not in str(four["main"])
    assert dict(four["main"].attrs["cases"]) == {"a == 4": {}, "b == 3": {"b": 3}}
    nine = bind_dims(ir, {"a": 9})
    expect_same_results(bind_dims(module(DIMS), {"a": 9}), nine, {"b": 3})
    assert dict(nine["main"].attrs["cases"]) == {"b == 3": {"b": 3}}
    assert "main_case_0" not in str(nine["main"])
    renamed = bind_dims(ir, {"a": "rows"})
    verify(renamed)
    assert list(renamed["main"].attrs["cases"]["a == 4"]) == ["rows"]
    doubled = bind_dims(ir, {"a": "2*rows"})
    verify(doubled)
    assert list(doubled["main"].attrs["cases"]["a == 4"]) == ["2*rows"]


def test_binding_an_argument_settles_its_conditions():
    ir = module(SCALED.format(dtype="float32"))
    after = bind_params(special_cases(ir, "main", [{"k": 2}, {"flag": True, "k": 3}, {"k": 4}]), {"k": 3})
    verify(after)
    assert dict(after["main"].attrs["cases"]) == {"flag == True and k == 3": {"flag": True}}


def test_binding_a_tensor_settles_what_is_asked_of_it():
    ir = special_cases(module(DIMS), "main", [{"mask": zeros, "b": 2}, {"mask": zeros}])
    for value, expected in ((0.0, {"mask == 0 and b == 2": {"b": 2}, "mask == 0": {}}), (1.0, {})):
        after = bind_params(ir, {"mask": torch.full((3,), value)})
        verify(after)
        assert dict(after["main"].attrs["cases"]) == expected


def test_what_was_asked_of_two_dims_is_asked_of_the_one_that_they_become():
    ir = special_cases(module(DIMS), "main", [{"a": (2, 4), "b": 3}, {"a": 4}])
    one = bind_dims(ir, {"a": "n", "b": "n"})
    verify(one)
    assert dict(one["main"].attrs["cases"]["2 <= a <= 4 and b == 3"]) == {"n": ("all", (2, 4), 3)}
    assert list(bind_dims(one, {"n": 3})["main"].attrs["cases"]) == ["2 <= a <= 4 and b == 3"]
    assert list(bind_dims(one, {"n": 4})["main"].attrs["cases"]) == ["a == 4"]


def test_what_is_asked_of_an_expression_is_settled_with_its_dims():
    doubled = bind_dims(special_cases(module(DIMS), "main", [{"a": 4}]), {"a": "2*rows"})
    assert dict(bind_dims(doubled, {"rows": 2})["main"].attrs["cases"]) == {"a == 4": {}}
    assert dict(bind_dims(doubled, {"rows": 3})["main"].attrs["cases"]) == {}
    renamed = bind_dims(doubled, {"rows": "lines"})
    assert list(renamed["main"].attrs["cases"]["a == 4"]) == ["2*lines"]


# With other passes.


def test_text_form_of_a_dispatch_is_read_back_and_runs_the_same():
    ir = special_cases(module(DIMS), "main", [{"a": 4}, {"a": (5, 8), "mask": zeros}, {"b": multiple_of(16)}])
    again = parse(str(ir))
    assert first_difference(ir, again) is None
    assert str(again) == str(ir)
    expect_same_results(ir, again, {"a": 5})


@pytest.mark.parametrize("a", [3, 4, 5])
def test_simplifying_and_inlining_keep_results_and_what_is_entered(a):
    ir = module(DIMS)
    special = special_cases(ir, "main", [{"a": 4}, {"a": (5, 8), "mask": zeros}, {"b": multiple_of(16)}])
    inputs = {"x": torch.randn(a, 3), "mask": torch.zeros(a)}
    expected = entered(special, inputs)
    for after in (run(special, "simplify"), inline(special), run(inline(special), "simplify")):
        verify(after)
        taken, result = entered(after, inputs)
        assert taken == expected[0]
        torch.testing.assert_close(result, expected[1])


def test_cases_of_cases_are_listed_in_the_order_in_which_they_are_asked():
    ir = special_cases(
        special_cases(module(DIMS), "main", [{"a": 4}, {"b": 2}]), "main", [{"b": (2, 3)}, {"a": 4}]
    )
    assert list(ir["main"].attrs["cases"]) == [
        "2 <= b <= 3 and a == 4",
        "2 <= b <= 3 and b == 2",
        "2 <= b <= 3",
        "a == 4",
        "a == 4 and b == 2",
        "b == 2",
    ]
    verify(ir)
    for a, b, case in (
        (4, 3, "2 <= b <= 3 and a == 4"),
        (5, 2, "2 <= b <= 3 and b == 2"),
        (5, 3, "2 <= b <= 3"),
        (4, 9, "a == 4"),
        (5, 9, "general"),
    ):
        inputs = {"x": torch.randn(a, b), "mask": torch.randn(a)}
        taken, result = entered(ir, inputs)
        assert taken == [case]
        torch.testing.assert_close(result, run_method(module(DIMS), "main", inputs, {}))


def test_a_size_that_is_computed_from_a_known_dim_is_known():
    ir = module(
        """
        def main[a, b](x: input float32[a, b]) -> float32[a*b] {
            y: float32[a*b] = reshape(x, shape=(a*b,))
            return y
        }
        """
    )
    after = special_cases(ir, "main", [{"a": 2, "b": 3}, {"a": 4}])
    assert [str(after[f"main_case_{i}"].result_type.shape[0]) for i in (0, 1)] == ["6", "4*b"]
    verify(after)
    expect_same_results(ir, after, {"a": 4, "b": 5})
    lifted = lift_transform_params(after)
    verify(lifted)


def test_a_known_tensor_still_says_the_dims_that_nothing_else_says():
    ir = module(
        """
        def main[n](x: input float32[n, 4], w: weight float32[4, 4]) -> float32[n, 4] {
            y: float32[n, 4] = linear(x, w)
            z: float32[n, 4] = add(y, x)
            return z
        }
        """
    )
    after = special_cases(ir, "main", [{"n": 2}, {"x": zeros}])
    verify(after)
    expect_same_results(ir, after, {"n": 3})
    assert [p.name for p in after["main_case_1"].params] == ["w", "n"]
