# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in the place of an op's attribute in a text, what comes of it is an error of ours or a result: from text to a call."""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
from few_of import few_of
from hostile import limits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import Case, Layer, type_of
from op_strategies import CASES

import nnfront as nn
from nnfront.errors import NnfrontError
from nnfront.ir import OPS, Call, Type, parse, sizes_of, type_text
from nnfront.ir.literals import quote
from nnfront.ir.op import Op
from nnfront.ir.print_types import TypePrinter

VALUES = [
    *("None", "True", "-1", "0", "1", "2", "3", "-7", "64", "10001", "65537"),
    *("9223372036854775807", "-9223372036854775808", "9223372036854775808", "9" * 40, "9" * 5000),
    *("0.5", "-0.5", "1e-320", "1e308", "1e999", "nan", "inf", "-inf", "-nan"),
    *("dim(n)", "dim(0 - n)", "dim(n // 3)", "n", "2*n + 1"),
    *(
        "()",
        "(0,)",
        "(1, 2)",
        "(1, 1, 1)",
        "(-1,)",
        "(0.5,)",
        "(None, None, None)",
        "((((1,),),),)",
        "(dim(n), None, 1)",
    ),
    *(
        "((inf, nan, 0),)",
        "((None, None, 0),)",
        "((type(float32[3]), None, None),)",
        "((1, 2, 0.5),)",
        "((2, 1, 1), 5)",
    ),
    *(
        "type(float32[3])",
        "type(float32[n, 9223372036854775807])",
        'type(fn(bool[]) -> (int64, object("x")))',
        "{a: 1}",
        "{}",
    ),
    *map(
        quote,
        (
            "",
            "float32",
            "float99",
            "bool",
            "constant",
            "ij,jk->ik",
            "...,...",
            "\x00",
            "\ud800",
            "None",
            "e" * 30_000,
        ),
    ),
    *map(quote, ("__import__('os').system('true')", "{0.__class__}", "{0:>1000000000}", "{", "{0}" * 3000)),
]


ATTRIBUTES = [pytest.param(op, name, id=f"{op.name}-{name}") for op in OPS.values() for name in op.attributes]


def text_of(case: Case, call: str, type: str) -> str:
    params = [
        f"x{i}: input {type_text(kind)}"
        for i, kind in enumerate(map(type_of, case.operands))
        if has_param(case.operands[i])
    ]
    return f"def main[n]({', '.join([*params, 'n: input int64(n)'])}) -> {type} {{ y: {type} = {call} return y }}"


def has_param(operand: Any) -> bool:
    return operand is not None and not isinstance(operand, bool | int | float)


def call_of(op: Op, case: Case, attrs: dict[str, str]) -> str:
    operands = [
        f"x{i}" if has_param(x) else "None" if x is None else repr(x) for i, x in enumerate(case.operands)
    ]
    return f"{op.name}({', '.join([*operands, *(f'{name}={value}' for name, value in attrs.items())])})"


def canonical(op: Op, text: str) -> tuple[dict[str, str], Type] | None:
    """The attributes of the call in a text in canonical form, and the type of its result; None if the op refuses it."""
    call = parse(text)["main"].bindings[0].value
    assert isinstance(call, Call)
    types = [None if a is None else a.type for a in call.args]
    if any(op.misfit(name, value) for name, value in call.attrs.items()):
        return None
    attrs = op.canonical_attrs(types, {n: call.attrs.get(n, d) for n, d in op.attributes.items()})
    shown = {name: TypePrinter(()).item(value) for name, value in attrs.items()}
    return shown, op.result_type(types, attrs)


def is_quick(type: Type) -> bool:
    """Whether computing it takes no time: it is small, or more than there is memory for."""
    elements = prod(size if isinstance(size, int) else 3 for size in sizes_of(type))
    return elements < 10_000 or elements > 1 << 40


def run(op: Op, case: Case, attrs: dict[str, str]) -> None:
    """Compile and call it as the text says it and, where the op takes the attributes, as it would say itself."""
    text = text_of(case, call_of(op, case, attrs), "float32[1]")
    with contextlib.suppress(NnfrontError):
        nn.compile(parse(text))
    try:
        own = canonical(op, text)
    except (NnfrontError, ArithmeticError, LookupError, TypeError, ValueError):
        return  # what a rule raises is for the verifier to say, and it has been asked
    if own is None:
        return
    shown, type = own
    text = text_of(case, call_of(op, case, shown), type_text(type))
    with contextlib.suppress(NnfrontError):
        method = nn.compile(parse(text)).load({})["main"]
        if is_quick(type) and not any(isinstance(x, Layer | tuple) for x in case.operands):
            given = [x for x in case.operands if has_param(x)]
            with contextlib.redirect_stdout(io.StringIO()):
                method(*given, 3)


@pytest.mark.parametrize(("op", "name"), few_of(ATTRIBUTES, 40))
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_forged_attribute_is_refused_or_harmless(op: Op, name: str, data: st.DataObject) -> None:
    forge(op, name, data, random.Random(f"{op.name} {name}").sample(VALUES, 16))


@pytest.mark.slow
@pytest.mark.parametrize(("op", "name"), ATTRIBUTES)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=False)
@given(data=st.data())
def test_a_forged_attribute_of_any_call_is_refused_or_harmless(
    op: Op, name: str, data: st.DataObject
) -> None:
    forge(op, name, data, VALUES)


def forge(op: Op, name: str, data: st.DataObject, values: Sequence[str]) -> None:
    case = data.draw(CASES[op.name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        types = [type_of(x) for x in case.operands]
        valid: dict[str, str] = {}
        with contextlib.suppress(NnfrontError):
            attrs = op.canonical_attrs(types, {n: case.attrs.get(n, d) for n, d in op.attributes.items()})
            valid = {n: TypePrinter(()).item(v) for n, v in attrs.items()}
        for value in values:
            with limits():
                try:
                    run(op, case, {**valid, name: value})
                except BaseException as error:
                    error.add_note(f"{call_of(op, case, {**valid, name: value})[:200]} with {types}")
                    raise
