# SPDX-License-Identifier: Apache-2.0
"""What authors get wrong, coming from torch, numpy, Keras, JAX or TVM: each is an error of ours that says where it is and how to mend it.

A row of a table (in mistakes/) is a line of code, then the lines that its error must hold. Every error of a line inside a layer names the layer's path,
the method and the line; every other is raised by the line itself, and names it where no export stands between them.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import NnfrontError
from nnfront.nn import elsewhere

TABLES = Path(__file__).parent / "mistakes"

AUTHOR = """
def count(size):
    return list(range(size))
class Layer(nn.Module):
    def __init__(self):
        self.proj = nn.Linear(4, 4)
        self.table = torch.ones(4)
        self.tensors = [1]
    def forward(self, x, n, cache):
        MISTAKE
        return x
class Model(nn.Module):
    def __init__(self):
        self.layer = Layer()
    def forward(self, x, n, cache):
        return self.layer(x, n, cache)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.head = None
    def forward(self, x): return self.proj(x)
    def two(self, x, y): return x + y
class Bare(nn.Module):
    pass
class Keras(nn.Module):
    def call(self, x): return x
def ret(forward):
    return type("Made", (nn.Module,), {"forward": forward})().export({"forward": {"x": X}})
X = spec.Tensor(["n", 4])
"""
LINE = AUTHOR[: AUTHOR.index("MISTAKE")].count("\n") + 1


def rows(table: str) -> list[Any]:
    found = []
    for row in (TABLES / table).read_text().strip().split("\n\n"):
        code, *expected = row.split("\n")
        found.append(pytest.param(code, [line.strip() for line in expected], id=code))
    return found


def author_code(mistake: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"nn": nn, "op": op, "spec": spec, "torch": torch, "np": np}
    exec(compile(AUTHOR.replace("MISTAKE", mistake), "author.py", "exec"), scope)
    return scope


def export_layer(mistake: str) -> None:
    arguments = {"x": spec.Tensor(["batch", 4]), "n": int, "cache": spec.Cache(2, 1, 4)}
    author_code(mistake)["Model"]().export({"forward": arguments})


def check(error: NnfrontError, expected: list[str]) -> str:
    text = f"{type(error).__name__}: {error}".replace(f"author.py:{LINE}", "author.py:LINE")
    for line in expected:
        assert line in text, text
    assert ("help: " in text) == any(line.startswith("help: ") for line in expected), text
    return text


@pytest.mark.parametrize(("mistake", "expected"), rows("in_a_layer.txt"))
def test_a_mistake_in_a_layer_is_named_with_its_path_its_line_and_its_mending(
    mistake: str, expected: list[str]
) -> None:
    with pytest.raises(NnfrontError) as caught:
        export_layer(mistake)
    text = check(caught.value, expected)
    assert any(line.startswith("at ") for line in expected) or (
        "\n  at layer in method 'forward' (author.py:LINE)" in text
    ), text


@pytest.mark.parametrize(("mistake", "expected"), rows("anywhere.txt"))
def test_a_mistake_outside_a_method_is_an_error_of_its_line(mistake: str, expected: list[str]) -> None:
    code = compile(mistake, "author.py", "exec")
    with pytest.raises(NnfrontError) as caught:
        exec(code, author_code("pass"))
    check(caught.value, expected)
    frames = [f for f in traceback.extract_tb(caught.value.__traceback__) if f.filename == "author.py"]
    assert frames[0].lineno == 1


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        ('raise ValueError("own")', ValueError, "own"),
        ('assert n is None, "no n"', AssertionError, "no n"),
        ("x.shape[5]", IndexError, "tuple index out of range"),
        ("a, b, c = x.shape", ValueError, "not enough values to unpack"),
        ('open("/nowhere/weights")', FileNotFoundError, "No such file"),
        ('{}["a"]', KeyError, "a"),
    ],
)
def test_an_error_of_the_author_s_own_stays_what_it_is_and_says_where(
    mistake: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        export_layer(mistake)
    assert caught.value.__notes__ == [f"  at layer in method 'forward' (author.py:{LINE})"]


def test_what_python_said_is_the_cause_and_can_be_caught_as_python_s() -> None:
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        export_layer('x + "a"')
    assert type(caught.value.__cause__) is TypeError


def test_hasattr_answers_for_tensors_modules_and_ops() -> None:
    export_layer('assert not hasattr(x, "view") and not hasattr(self, "prj") and not hasattr(op, "cat")')


def test_an_error_in_a_function_that_a_layer_calls_names_the_line_of_the_function() -> None:
    with pytest.raises(NnfrontError, match=r"at layer in method 'forward' \(author\.py:3\)"):
        export_layer("count(x.shape[0])")


def test_a_model_may_call_the_init_of_its_base() -> None:
    assert [name for name, _ in author_code("pass")["Net"]().named_parameters()] == [
        "proj.weight",
        "proj.bias",
    ]


def test_every_name_of_another_framework_is_answered_with_names_that_exist() -> None:
    for written in elsewhere._WRITTEN.values():
        for name in re.findall(r"\bop\.(\w+)", written):
            assert hasattr(op, name), written
        for name in re.findall(r"\bx\.(\w+)", written):
            assert hasattr(nn.Tensor, name), written
        for name in re.findall(r"\bnn\.(\w+)", written):
            assert hasattr(nn, name), written
