# SPDX-License-Identifier: Apache-2.0
"""Ops about running: external functions and printing."""

import pytest
import torch
from call import attrs_of, infer, run, t

from nnfront import ops
from nnfront.errors import InferError, RunError
from nnfront.ir.types import ScalarType, TupleType

ONE = t(1)


class Placeholder:
    """Stands for the author's tensor: all that counts is its type."""

    type = ONE


def test_an_external_function_gets_its_arguments_in_order() -> None:
    ops.register_extern("tests.scaled", lambda x, factor, offset: x * factor + offset)
    x = torch.randn(1)
    assert torch.equal(run(ops.extern, x, 3, 0.5, name="tests.scaled", out=ONE), x * 3 + 0.5)


def test_what_an_external_function_returns_is_said_by_placeholders_or_types() -> None:
    assert infer(ops.extern, name="f", out=Placeholder()) == ONE
    assert infer(ops.extern, name="f", out=[Placeholder(), t(2)]) == TupleType((ONE, t(2)))
    assert attrs_of(ops.extern, [], {"name": "f", "out": Placeholder()}) == {"name": "f", "out": ONE}


def test_several_results_of_an_external_function_are_a_tuple() -> None:
    ops.register_extern("tests.list", lambda: [torch.zeros(1), torch.ones(1)])
    assert run(ops.extern, name="tests.list", out=[ONE, ONE]) == (torch.zeros(1), torch.ones(1))


def test_an_unknown_external_function_is_named_with_what_to_do() -> None:
    with pytest.raises(RunError) as caught:
        run(ops.extern, name="tests.none", out=ONE)
    assert caught.value.what == "no external function is called 'tests.none'"
    assert caught.value.help == "call nnfront.register_extern('tests.none', function) before it runs"


def test_a_name_stands_for_one_external_function() -> None:
    ops.register_extern("tests.print", print)
    ops.register_extern("tests.print", print)
    with pytest.raises(RunError) as caught:
        ops.register_extern("tests.print", len)
    assert caught.value.what == "the external function 'tests.print' is registered already"


def test_print_writes_the_format_or_the_values(capsys: pytest.CaptureFixture[str]) -> None:
    run(ops.print_, torch.tensor(1), 2, format="x = {}, n = {}")
    run(ops.print_, torch.tensor([3]), 4)
    assert capsys.readouterr().out == "x = 1, n = 2\ntensor([3])\n4\n"


@pytest.mark.parametrize(
    "format",
    [
        "{1} {0}",
        "{{{0}}} {{x}}",
        "{:>8.3f}|{:04d}",
        "{0:.2e} {1:#x} {1:,}",
        "{0:*^12.1%}",
        "{:+g}",
        "{:_<9} é",
        "",
    ],
)
def test_a_format_says_what_python_would(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = torch.tensor(0.125), 1000
    ops.print_.result_type([t(), ScalarType("int64")], {"format": format})
    run(ops.print_, *values, format=format)
    assert (
        capsys.readouterr().out
        == (format.format(*values) if format else "0.125\n1000".replace("0.125", str(values[0]))) + "\n"
    )


@pytest.mark.parametrize(
    ("format", "what"),
    [
        (
            "{0.backward.__globals__}",
            "print_: the format '{0.backward.__globals__}' cannot be read at '{0.backward.__global'",
        ),
        ("{0[0]}", "print_: the format '{0[0]}' cannot be read at '{0[0]}'"),
        ("{0!r}", "print_: the format '{0!r}' cannot be read at '{0!r}'"),
        ("{x}", "print_: the format '{x}' cannot be read at '{x}'"),
        ("{0:{1}}", "print_: the format '{0:{1}}' cannot be read at '{0:{1}}'"),
        ("a { b", "print_: the format 'a { b' cannot be read at '{ b'"),
        ("{0:>1000000000}", "print_: '>1000000000' is no specification of a field that print_ knows"),
        ("{0:>1001}", "print_: a width is at most 1000, got 1001"),
        ("{0:.2000f}", "print_: a precision is at most 1000, got 2000"),
        ("{0:c}", "print_: 'c' is no specification of a field that print_ knows"),
        ("{0} {}", "print_: fields of a format have numbers all or none"),
        ("{2}", "print_: the format names operand 2, there are 2"),
        ("{0:d}", "print_: operand 0 is a float32: Unknown format code 'd' for object of type 'float'"),
        ("{1:.2}", "print_: operand 1 has axes, and only a single number is shown as '.2'"),
    ],
)
def test_a_format_reaches_nothing_but_the_operands(format: str, what: str) -> None:
    with pytest.raises(InferError) as error:
        infer(ops.print_, t(), t(2), format=format)
    assert error.value.what == what


@pytest.mark.parametrize(
    ("values", "ranges", "expected"),
    [
        ([3], [(3, 3, None)], True),
        ([4], [(3, 3, None)], False),
        ([2], [(2, 8, None)], True),
        ([8], [(2, 8, None)], True),
        ([9], [(2, None, 3)], True),
        ([9], [(2, None, 4)], False),
        ([-1], [(None, 0, None)], True),
        ([5, True, torch.tensor(0)], [(None, None, 5), (1, 1, None), (0, 0, None)], True),
        ([5, False, torch.tensor(0)], [(None, None, 5), (1, 1, None), (0, 0, None)], False),
    ],
)
def test_every_number_must_lie_in_its_range(
    values: list[object], ranges: list[object], expected: bool
) -> None:
    assert run(ops.within, *values, ranges=ranges) is expected


def test_ranges_are_as_many_as_values() -> None:
    with pytest.raises(
        InferError, match=r"^within: 1 values need as many ranges \(least, greatest, divisor\), got \(\)"
    ):
        infer(ops.within, ScalarType("int64"), ranges=())
    with pytest.raises(InferError, match=r"^within: there is no value to compare"):
        infer(ops.within, ranges=())
    with pytest.raises(InferError, match=r"^within: a tensor with axes is no number"):
        infer(ops.within, ONE, ranges=[(0, 1, None)])
