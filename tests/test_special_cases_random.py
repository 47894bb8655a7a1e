# SPDX-License-Identifier: Apache-2.0
"""Random cases over random functions: the first case that holds is taken, results are the general ones, lifting commutes."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nnfront as nn
from nnfront import ops
from nnfront.cases import case_text
from nnfront.dims import Dim, evaluate
from nnfront.errors import PassError
from nnfront.ir import Function, FunctionBuilder, FunctionCall, IRModule, ScalarType, TensorType, Var, verify

A, B = Dim("a", min=1, max=6), Dim("b", min=1, max=6)
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)


def private() -> Function:
    """A layer of any two sizes, whose weight is transposed on the way."""
    builder = FunctionBuilder("layer")
    p, q = Dim("p"), Dim("q")
    x = builder.param("x", TensorType((p, q, 4), "float32"), "input")
    w = builder.param("w", TensorType((4, 4), "float32"), "weight")
    return builder.finish(builder.call(ops.matmul, x, builder.call(ops.permute_dims, w)), "private")


def flattened(b: FunctionBuilder, x: Var) -> Var:
    flat = b.call(ops.reshape, x, shape=(A * B, 4))
    return b.call(ops.reshape, b.call(ops.relu, flat), shape=(A, B, 4))


def through_layer(b: FunctionBuilder, x: Var) -> Var:
    return b.emit(FunctionCall("layer", (x, next(p for p in b.params if p.name == "w"))))


def masked(b: FunctionBuilder, x: Var) -> Var:
    return b.call(ops.add, x, b.call(ops.sum, b.call(ops.exp, b.params[1])))


def counted(b: FunctionBuilder, x: Var) -> Var:
    return b.call(ops.add, x, b.params[2])


def rows(b: FunctionBuilder, x: Var) -> Var:
    return b.call(ops.cumsum, x, axis=1)


STEPS = (flattened, through_layer, masked, counted, rows)


@st.composite
def functions(draw) -> IRModule:
    layer = private()
    builder = FunctionBuilder("main", {"layer": layer})
    x: Var = builder.param("x", TensorType((A, B, 4), "float32"), "input")
    builder.param("mask", TensorType((A, B), "float32"), "input")
    builder.param("k", ScalarType("int64"), "input")
    builder.param("flag", ScalarType("bool"), "input")
    builder.param("w", TensorType((4, 4), "float32"), "weight")
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=4)):
        x = step(builder, x)
    return IRModule([layer, builder.finish(x)])


SIZE = st.integers(1, 6)
DIM = st.one_of(
    SIZE,
    st.tuples(SIZE, SIZE).map(lambda ends: (min(ends), max(ends))),
    st.integers(1, 3).map(nn.multiple_of),
)
CASE = st.fixed_dictionaries(
    {},
    optional={
        "a": DIM,
        "b": DIM | st.lists(DIM, min_size=2, max_size=2),
        "k": st.integers(0, 2),
        "flag": st.booleans(),
        "mask": st.sampled_from([nn.zeros, nn.causal]),
    },
).filter(bool)


def number_holds(condition, number) -> bool:
    if isinstance(condition, list):
        return all(number_holds(part, number) for part in condition)
    if isinstance(condition, nn.multiple_of):
        return number % condition.divisor == 0
    return condition[0] <= number <= condition[1] if isinstance(condition, tuple) else number == condition


def mask_holds(condition, mask) -> bool:
    wanted = torch.zeros_like(mask)
    if condition is not nn.zeros:
        for i, j in itertools.product(*map(range, mask.shape)):
            wanted[i, j] = 0.0 if j <= i else -torch.inf
    return torch.equal(mask, wanted)


def first_that_holds(cases, inputs) -> int:
    """The number of the first case that holds, as many as there are for none: said once more, one input after the other."""
    x, mask, k, flag = inputs
    known = {"a": x.shape[0], "b": x.shape[1], "k": k, "flag": flag}
    for i, case in enumerate(cases):
        if all(mask_holds(c, mask) if n == "mask" else number_holds(c, known[n]) for n, c in case.items()):
            return i
    return len(cases)


def inputs_of(draw):
    a, b = draw(SIZE), draw(SIZE)
    masks = [torch.randn(a, b), torch.zeros(a, b), torch.full((a, b), -torch.inf).triu(1)]
    return torch.randn(a, b, 4), draw(st.sampled_from(masks)), draw(st.integers(0, 2)), draw(st.booleans())


def specialised(ir, cases) -> IRModule | None:
    """The module with these cases, None if no input meets or reaches one of them."""
    try:
        return nn.passes.special_cases(ir, "main", cases)
    except PassError as error:
        if "never" not in error.what:
            raise
        return None


@PROPERTY
@given(st.data())
def test_the_first_case_that_holds_runs_and_computes_what_the_general_function_does(data):
    ir, cases = data.draw(functions()), data.draw(st.lists(CASE, min_size=1, max_size=4))
    special = specialised(ir, cases)
    if special is None:
        return
    verify(special)
    assert nn.ir.parse(str(special)) == special
    weights = {"w": torch.randn(4, 4)}
    lift = nn.passes.lift_transform_params
    both = [
        lift(special, shared_transform=True),
        nn.passes.special_cases(lift(ir, shared_transform=True), "main", cases),
    ]
    for lifted in both:
        verify(lifted)
        assert len([f for f in lifted.functions if f.kind == "transform"]) == bool(ir["main"].weights)
    assert [p.name for p in both[0]["main"].params] == [p.name for p in both[1]["main"].params]
    plain = nn.compile(ir).load(weights)["main"]
    sessions = [nn.compile(each).load(weights) for each in (special, *both)]
    expected = [0] * (len(cases) + 1)
    for _ in range(4):
        inputs = inputs_of(data.draw)
        expected[first_that_holds(cases, inputs)] += 1
        result = plain(*inputs)
        for session in sessions:
            torch.testing.assert_close(session["main"](*inputs), result)
    texts = [*(case_text(case) for case in cases), "general"]
    for session in sessions:
        assert [session.hits("main")[text] for text in texts] == expected


@PROPERTY
@given(st.lists(CASE, min_size=2, max_size=4))
def test_a_case_is_refused_as_never_reached_only_if_no_input_reaches_it(cases):
    layer_free = nn.ir.parse(
        f"def main[a: {A.symbols[0].min}..6, b: 1..6](x: input float32[a, b, 4], mask: input float32[a, b], k: input int64, flag: input bool)"
        " -> float32[a, b, 4] { y: float32[a, b, 4] = relu(x) return y }"
    )
    try:
        nn.passes.special_cases(layer_free, "main", cases)
    except PassError as error:
        if "is never reached" not in error.what:
            return
        refused = int(error.what.split()[1])
        for a, b, k, flag in itertools.product(range(1, 7), range(1, 7), range(3), (False, True)):
            masks = [torch.ones(a, b), torch.zeros(a, b), torch.full((a, b), -torch.inf).triu(1)]
            for mask in masks:
                assert first_that_holds(cases, (torch.empty(a, b, 4), mask, k, flag)) != refused


@PROPERTY
@given(st.data())
def test_binding_dims_after_the_cases_is_binding_them_before(data):
    ir, cases = data.draw(functions()), data.draw(st.lists(CASE, min_size=1, max_size=3))
    special = specialised(ir, cases)
    if special is None:
        return
    numbers = {"a": data.draw(SIZE)}
    bound = nn.passes.bind_dims(special, numbers)
    verify(bound)
    weights = {"w": torch.randn(4, 4)}
    x, mask, k, flag = inputs_of(data.draw)
    a, b = numbers["a"], x.shape[1]
    x, mask = torch.randn(a, b, 4), torch.zeros(a, b)
    expected = nn.compile(ir).load(weights)["main"](x, mask, k, flag)
    method = nn.compile(bound).load(weights)["main"]
    torch.testing.assert_close(method(x, mask, k, flag), expected)
    taken = first_that_holds(cases, (x, mask, k, flag))
    text = [*(case_text(case) for case in cases), "general"][taken]
    assert {case for case, count in method.hits.items() if count} == {text}
    assert method.explain(x, mask, k, flag).taken == text
    assert evaluate(ir["main"].result_type.shape[0], numbers) == a
