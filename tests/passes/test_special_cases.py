# SPDX-License-Identifier: Apache-2.0
"""Special cases: the right variant runs, computes what the general one does, and knows what its case says."""

from __future__ import annotations

import pytest
import torch
from pass_checks import expect_same_results, module
from pass_evaluator import Run, run_method

from nnfront.errors import PassError
from nnfront.ir import FunctionCall, If, first_difference, verify
from nnfront.passes import (
    inline,
    lift_transform_params,
    multiple_of,
    outline,
    run,
    special_cases,
    zeros,
)

TEXT = """
private def layer[b, s](x: input float32[b, s, 4], w: weight float32[4, 4]) -> float32[b, s, 4] {
    t: float32[4, 4] = permute_dims(w, axes=(1, 0))
    y: float32[b, s, 4] = matmul(x, t)
    return y
}
def main[batch, seq: 1..64](x: input float32[batch, seq, 4], mask: input float32[seq], scale: input bool, w: weight float32[4, 4])
        -> {y: float32[batch*seq, 4], tail: float32[min(seq, 16)]} {
    a: float32[batch, seq, 4] = @layer(x, w)
    column: float32[seq, 1] = unsqueeze(mask, dim=1)
    b: float32[batch, seq, 4] = add(a, column)
    c: float32[batch, seq, 4] = if scale {
        d: float32[batch, seq, 4] = multiply(b, 2.0)
        yield d
    } else {
        yield b
    }
    y: float32[batch*seq, 4] = reshape(c, shape=(batch*seq, 4))
    tail: float32[min(seq, 16)] = getitem(mask, index=((0, min(seq, 16), 1),))
    r: {y: float32[batch*seq, 4], tail: float32[min(seq, 16)]} = {y: y, tail: tail}
    return r
}
"""
CASES = [
    {"batch": 1, "seq": 1},
    {"batch": (2, 8), "mask": zeros},
    {"seq": multiple_of(16)},
    {"scale": True},
]


def taken(ir, name, inputs, weights):
    """The functions that a call runs, in order."""
    calls = []
    expr = Run.expr

    def note(self, value):
        if isinstance(value, FunctionCall):
            calls.append(value.function)
        return expr(self, value)

    Run.expr = note
    try:
        result = run_method(ir, name, inputs, weights)
    finally:
        Run.expr = expr
    return [c for c in calls if c.startswith(f"{name}_")], result


@pytest.mark.parametrize(
    ("batch", "seq", "mask", "scale", "variant"),
    [
        (1, 1, 1.0, True, "main_case_0"),
        (1, 1, 0.0, False, "main_case_0"),
        (2, 1, 0.0, True, "main_case_1"),
        (8, 16, 0.0, False, "main_case_1"),
        (9, 16, 0.0, False, "main_case_2"),
        (2, 16, 1.0, True, "main_case_2"),
        (2, 17, 1.0, True, "main_case_3"),
        (1, 2, 0.0, True, "main_case_3"),
        (2, 17, 1.0, False, "main_general"),
    ],
)
@pytest.mark.parametrize("lifts", [None, "before", "after"])
def test_the_first_case_that_holds_runs_and_computes_the_same(batch, seq, mask, scale, variant, lifts):
    ir = module(TEXT)
    after = lift_transform_params(ir) if lifts == "before" else ir
    after = special_cases(after, "main", CASES)
    after = lift_transform_params(after) if lifts == "after" else after
    inputs = {"x": torch.randn(batch, seq, 4), "mask": torch.full((seq,), mask), "scale": scale}
    weights = {"w": torch.randn(4, 4)}
    calls, result = taken(after, "main", inputs, weights)
    assert calls == [variant]
    torch.testing.assert_close(result, run_method(ir, "main", inputs, weights))


def test_lifting_after_the_cases_is_lifting_before_them():
    # One transform, one set of weights, whatever the order: no variant has weight work left.
    after = lift_transform_params(special_cases(module(TEXT), "main", CASES))
    assert [p.name for p in after["main"].weights] == ["t"]
    assert all("permute_dims" not in str(f) for f in after.functions if f.kind != "transform")


def test_derived_tensors_still_move_when_cases_came_first():
    ir = module(
        """
        def main[n](x: input float32[n, 4], q: weight int8[4, 4]) -> float32[n, 4] attrs(derived=("w",)) {
            w: float32[4, 4] = astype(q, dtype="float32")
            y: float32[n, 4] = linear(x, w, None)
            return y
        }
        """
    )
    after = lift_transform_params(special_cases(ir, "main", [{"n": 1}]))
    assert [p.name for p in after["main"].weights] == ["w"]
    expect_same_results(ir, after)
    assert first_difference(lift_transform_params(after), after) is None


def test_a_variant_knows_what_its_case_says():
    after = special_cases(module(TEXT), "main", CASES)
    first, second, third, fourth = (after[f"main_case_{i}"] for i in range(4))
    assert first.symbols == ()
    assert [(s.name, s.facts) for s in second.symbols] == [("batch", (2, 8, 1)), ("seq", (1, 64, 1))]
    assert [p.name for p in second.params] == ["x", "scale", "w"]
    assert second.bindings[0].value.op.name == "zeros"
    assert [s.facts for s in third.symbols] == [(0, None, 1), (1, 64, 16)]
    assert [p.name for p in fourth.params] == ["x", "mask", "w"]


def test_the_signature_stays_and_the_cases_are_told_in_words():
    ir = module(TEXT)
    after = special_cases(ir, "main", CASES)
    assert after["main"].params == ir["main"].params
    assert after["main"].result_type == ir["main"].result_type
    assert dict(after["main"].attrs["cases"]) == {
        "batch == 1 and seq == 1": {"batch": 1, "seq": 1},
        "2 <= batch <= 8 and mask == 0": {"batch": (2, 8), "mask": ("zeros",)},
        "seq % 16 == 0": {"seq": ("multiple_of", 16)},
        "scale == True": {"scale": True},
    }
    assert isinstance(after["main"].bindings[-1].value, If)


def test_no_cases_change_nothing():
    ir = module(TEXT)
    assert special_cases(ir, "main", []) is ir


def test_cases_of_cases():
    ir = module(TEXT)
    after = special_cases(special_cases(ir, "main", [{"batch": 1}]), "main", [{"seq": 16}])
    assert [f.name for f in after.functions] == [
        "layer",
        "main_case_0",
        "main_general",
        "main_case_0_1",
        "main_general_1",
        "main",
    ]
    expect_same_results(ir, after, {"batch": 1, "seq": 16})


def test_a_number_argument_that_is_a_dim_is_bound_with_it():
    ir = module(
        """
        def main[n](x: input float32[n], count: input int64(n), k: input int64) -> float32[n] {
            z: float32[n] = ones(shape=(n,))
            y: float32[n] = add(x, k)
            r: float32[n] = add(y, z)
            return r
        }
        """
    )
    after = special_cases(ir, "main", [{"n": 3}, {"count": 4, "k": 2}])
    for n, k in ((3, 1), (4, 2), (4, 3), (5, 2)):
        inputs = {"x": torch.randn(n), "count": n, "k": k}
        torch.testing.assert_close(run_method(after, "main", inputs, {}), run_method(ir, "main", inputs, {}))


def test_a_cache_goes_through_a_dispatch():
    layer = "layer(kv_heads=1, head_size=4, dtype=float32, batch=b, max_seq=m)"
    ir = module(
        f"""
        def main[b, s, m](q: input float32[b, s, 1, 4], cache: state {layer}) -> (float32[b, s, 1, 4], {layer}) {{
            a: (float32[b, s, 1, 4], {layer}) = attention(q, q, q, cache)
            out: float32[b, s, 1, 4] = a[0]
            written: {layer} = a[1]
            r: (float32[b, s, 1, 4], {layer}) = (out, written)
            return r
        }}
        """
    )
    after = special_cases(ir, "main", [{"b": 1, "s": 1}, {"s": (2, 8)}])
    assert after["main"].result_type == ir["main"].result_type
    assert str(after["main_case_0"].params[1].type.batch) == "1"


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        (
            [{"sequence": 1}],
            "main has no dim and no argument 'sequence'\n  dims are batch, seq; arguments are x, mask, scale",
        ),
        ([{"seq": 65}], "'seq == 65' never holds for main\n  seq is between 1 and 64"),
        ([{"seq": (5, 3)}], "'5 <= seq <= 3' never holds for main\n  seq is between 1 and 64"),
        ([{"seq": multiple_of(65)}], "'seq % 65 == 0' never holds for main\n  seq is between 1 and 64"),
        (
            [{"seq": "16"}],
            "'16' is no condition on dim 'seq' of main\n  help: give a number, a range (least, greatest), multiple_of(number), or a list of these",
        ),
        (
            [{"scale": 1}],
            "1 is no condition on argument 'scale' of main\n  help: give zeros or causal for a tensor, or a number for a host argument or a tensor without axes",
        ),
        ([{}], "a case of main has no condition\n  help: the general case needs no mention"),
    ],
    ids=["unknown", "too large", "empty range", "no multiple", "kind", "value", "nothing"],
)
def test_a_case_that_means_nothing_is_refused(cases, message):
    with pytest.raises(PassError) as caught:
        special_cases(module(TEXT), "main", cases)
    assert str(caught.value) == message


def test_only_public_functions_have_cases():
    with pytest.raises(PassError, match=r"^there is no public function 'layer'"):
        special_cases(module(TEXT), "layer", [{"b": 1}])


# What a case knows of the branches of a method.

ASKING = """
private def three(x: input float32[3]) -> float32[3] { y: float32[3] = relu(x) return y }
private def few[p: 2..4](x: input float32[p]) -> float32[p] { y: float32[p] = exp(x) return y }
def main[b](x: input float32[b], k: input int64) -> float32[b] {
    c: bool = within(dim(b), ranges=((3, 3, None),))
    z: float32[b] = if c {
        y: float32[3] = @three(x)
        yield y
    } else {
        d: bool = within(dim(b), k, ranges=((2, 4, None), (1, 1, None)))
        v: float32[b] = if d { w: float32[b] = @few(x) yield w } else { yield x }
        yield v
    }
    return z
}
"""


@pytest.mark.parametrize(
    ("case", "called"),
    [
        ({"b": (1, 2)}, {"few"}),
        ({"b": (4, 9)}, {"few"}),
        ({"b": (5, 9)}, set()),
        ({"b": multiple_of(2)}, {"few"}),
        ({"b": (2, 3)}, {"three", "few"}),
        ({"b": [multiple_of(3), (1, 5)]}, {"three"}),
        ({"k": 0}, {"three"}),
        ({"k": 1, "b": 4}, {"few"}),
    ],
)
def test_a_branch_that_a_case_makes_impossible_goes_before_its_types_are_asked(case, called):
    ir = module(ASKING)
    after = special_cases(ir, "main", [case])
    assert {name for name in ("three", "few") if f"@{name}(" in str(after["main_case_0"])} == called
    for b in range(1, 10):
        for k in (0, 1):
            inputs = {"x": torch.randn(b), "k": k}
            for each in (after, inline(after), run(after, "simplify")):
                torch.testing.assert_close(
                    run_method(each, "main", inputs, {}), run_method(ir, "main", inputs, {})
                )


def test_a_branch_that_contradicts_the_one_around_it_goes():
    nested = module(
        ASKING.replace(
            "yield y",
            "e: bool = within(dim(b), ranges=((4, 4, None),)) f: float32[b] = if e { g: float32[b] = @few(x) yield g } else { yield y } yield f",
        )
    )
    assert str(nested["main"]).count("@few(") == 2
    assert str(special_cases(nested, "main", [{"b": (2, 9)}])["main_case_0"]).count("@few(") == 1


@pytest.mark.parametrize(
    "lists",
    [
        [[{"a": 0, "b": 7}], [{"b": [multiple_of(3), (4, 10)], "a": [multiple_of(3), (1, 7)]}]],
        [[{"a": 0, "b": 7}, {"a": multiple_of(2)}], [{"a": [multiple_of(3), (1, 7)]}, {"b": (6, 8)}]],
        [[{"a": 4}], [{"a": (1, 8)}], [{"a": multiple_of(3)}]],
    ],
    ids=["as dims", "lists", "three rounds"],
)
def test_what_one_case_knows_is_not_known_in_another(lists):
    ir = module(
        "def main[a, b](x: input float32[a, b]) -> float32[a*b] { y: float32[a*b] = reshape(x, shape=(a*b,)) return y }"
    )
    after = ir
    for cases in lists:
        after = special_cases(after, "main", cases)
    for each in (after, inline(after), run(after, "simplify")):
        verify(each)
        for a in range(10):
            for b in (6, 7, 8):
                x = torch.randn(a, b)
                torch.testing.assert_close(run_method(each, "main", {"x": x}, {}), x.reshape(-1))


def test_cases_of_cases_leave_primitive_functions_as_they_are():
    ir = outline(
        module(
            """
            def main[n](x: input float32[n, 4], k: input int64, w: weight float32[4, 4], r: input float32[n, 4]) -> float32[n, 4] {
                y: float32[n, 4] = linear(x, w, None)
                z: float32[n, 4] = add(y, r)
                v: float32[n, 4] = multiply(z, k)
                return v
            }
            """
        )
    )
    fused = [f for f in ir.functions if f.kind == "fused"]
    assert fused
    after = ir
    for cases in ([{"n": 1}, {"k": 2}], [{"n": (1, 4)}], [{"k": 0}]):
        after = special_cases(after, "main", cases)
    assert all(after[f.name] is f for f in fused)
    for n in (1, 3, 5):
        expect_same_results(ir, after, {"n": n})
