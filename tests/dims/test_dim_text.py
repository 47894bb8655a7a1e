# SPDX-License-Identifier: Apache-2.0
"""Reading dims from text and from what users put into shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from nnfront import dims
from nnfront.dims import Dim, parse, same, to_size
from nnfront.errors import DimError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7),
        ("-7 // 2", -4),
        ("-7 % 3", 2),
        ("2 + 3*4", 14),
        ("(2 + 3)*4", 20),
        ("7 // 2 * 2", 6),
        ("- - 3", 3),
        ("ceildiv(7, 2)", 4),
        ("floordiv(7, 2)", 3),
        ("mod(7, 2)", 1),
        ("min(3, 1, 2)", 1),
        ("max(3)", 3),
        (" seq ", Dim("seq")),
        ("2*seq+1", 2 * Dim("seq") + 1),
        ("größe_2", Dim("größe_2")),
        ("lambda + for", Dim("lambda") + Dim("for")),
    ],
)
def test_parse(text, size):
    assert same(parse(text), size)


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("", 0, "expected a number, a name or '(', but the text ends"),
        ("2*seq +", 7, "expected a number, a name or '(', but the text ends"),
        ("2 seq", 2, "expected an operator or the end, but got 'seq'"),
        ("seq $ 2", 4, "expected a number, a name or an operator, but got '$'"),
        ("seq / 2", 4, "expected a number, a name or an operator, but got '/'"),
        ("n.1", 1, "expected a number, a name or an operator, but got '.'"),
        ("(seq", 4, "expected ')', but the text ends"),
        ("seq)", 3, "expected an operator or the end, but got ')'"),
        ("min seq", 4, "expected '(', but got 'seq'"),
        ("min()", 4, "expected a number, a name or '(', but got ')'"),
        ("min(a, b", 8, "expected ')', but the text ends"),
        ("ceildiv(a)", 9, "expected two arguments of ceildiv, but got ')'"),
        ("mod(a, b, c)", 11, "expected two arguments of mod, but got ')'"),
        ("a ** 2", 3, "expected a number, a name or '(', but got '*'"),
        ("9" * 31, 0, f"expected a number of at most 30 digits, but got '{'9' * 31}'"),
    ],
)
def test_invalid_text_is_shown_with_a_caret(text, column, problem):
    with pytest.raises(DimError) as caught:
        parse(text)
    assert str(caught.value) == (
        f"cannot read the dim {text!r}\n"
        f"  {text}\n"
        f"  {' ' * column}^\n"
        f"  {problem}\n"
        "  help: a dim is made of ints, names, + - * // %, parentheses, min, max, floordiv, ceildiv and mod"
    )


@pytest.mark.parametrize("text", ["(" * 100 + "n" + ")" * 100, "-" * 100 + "n"])
def test_nesting_is_limited(text):
    with pytest.raises(DimError, match="expected at most 50 levels of nesting"):
        parse(text)


def test_parsed_names_carry_no_facts():
    Dim("seq", min=3)
    assert parse("seq").min == 0


@pytest.mark.parametrize(
    ("x", "size"),
    [(3, 3), (0, 0), (numpy.int64(3), 3), ("3", 3), ("n + 1", Dim("n") + 1), (Dim("n"), Dim("n"))],
)
def test_to_size(x, size):
    assert same(to_size(x), size)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (-1, "a size is never negative, got -1"),
        ("2 - 3", "a size is never negative, got '2 - 3'"),
        (True, "True is not a size\n  got bool, expected an int, a name, an expression or a Dim"),
        (2.0, "2.0 is not a size\n  got float, expected an int, a name, an expression or a Dim"),
        (None, "None is not a size\n  got NoneType, expected an int, a name, an expression or a Dim"),
        (int, "<class 'int'> is not a size\n  got type, expected an int, a name, an expression or a Dim"),
    ],
)
def test_to_size_refuses(x, message):
    with pytest.raises(DimError) as caught:
        to_size(x)
    assert str(caught.value) == message


def test_to_size_reads_torch_export_dims():
    batch = torch.export.Dim("batch", min=2, max=8)
    size = to_size(batch)
    assert (str(size), size.min, size.max) == ("batch", 2, 8)
    unbounded = to_size(torch.export.Dim("seq"))
    assert (str(unbounded), unbounded.min, unbounded.max) == ("seq", 0, None)
    derived = to_size(2 * batch + 1)
    assert (str(derived), derived.min, derived.max) == ("2*batch + 1", 5, 17)


@pytest.mark.parametrize("count", [numpy.int64(3), numpy.int32(3)])
def test_arithmetic_takes_numpy_ints(count):
    assert same(Dim("n") * count + count, 3 * Dim("n") + 3)


def test_text_does_not_depend_on_the_hash_seed():
    program = (
        "from nnfront.dims import *\n"
        "a, b, f, g = Dim('alpha', multiple_of=4), Dim('beta'), Dim.fresh('n'), Dim.fresh('n')\n"
        "size = (a + b*3 + f - g)*(a//4 + b % 7)*minimum(f, g, a, 9) + ceildiv(b*f, 5) - maximum(b, g) // (a + 1)\n"
        "print(size, size.symbols, substitute(size, {a.symbols[0]: b + 1}), hash(size) is None)"
    )
    texts = set()
    for seed in ("1", "2", "3"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        texts.add(done.stdout)
    assert len(texts) == 1
    assert len(texts.pop()) > 300


def test_public_names_are_documented_and_complete():
    assert sorted(dims.__all__) == dims.__all__
    for name in dims.__all__:
        assert getattr(dims, name).__doc__ or name == "Size"
