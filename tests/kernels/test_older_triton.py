# SPDX-License-Identifier: Apache-2.0
"""What the oldest version of Triton that is taken does not compile and later ones do, looked for in the text of the kernels.

3.6 lets a function return None where it has made it itself, not where it was given as an argument, and puts no None into a tuple.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import nnfront_kernels

FILES = sorted(Path(nnfront_kernels.__file__).parent.glob("*.py"))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Those that Triton compiles."""
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        if any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list):
            yield function


def names(node: ast.AST) -> list[str]:
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]


def may_be_none(function: ast.FunctionDef) -> set[str]:
    """Names that a function compares with None or sets to it."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            found |= {*names(node.left)}
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is None:
            found |= {*names(node.targets[0])}
    return found


def given_back(tree: ast.Module) -> list[str]:
    """Functions that return an argument which may be None."""
    found = []
    for function in functions(tree):
        given = {argument.arg for argument in function.args.args} & may_be_none(function)
        returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
        found += [function.name for value in returned if isinstance(value, ast.Name) and value.id in given]
    return found


def in_tuples(tree: ast.Module, makers: set[str]) -> list[str]:
    """Functions that put into a tuple what one of the makers, which may return None, has made."""
    return [
        function.name
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for part in node.value.elts
        if isinstance(part, ast.Call) and ast.unparse(part.func) in makers
    ]


def makers(trees: list[ast.Module]) -> set[str]:
    """Functions that may return None."""
    return {
        function.name
        for tree in trees
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
        if node.value.id in may_be_none(function)
    }


TREES = {file.name: ast.parse(file.read_text()) for file in FILES}


def test_no_argument_that_may_be_none_is_given_back():
    assert {file: found for file, tree in TREES.items() if (found := given_back(tree))} == {}


def test_what_may_be_none_is_in_no_tuple():
    may = makers([*TREES.values()])
    assert {"moved", "bias_rows_of"} <= may
    assert {file: found for file, tree in TREES.items() if (found := in_tuples(tree, may))} == {}


GIVEN_BACK = """
@triton.jit
def moved(ptr, base_ptr):
    if ptr is not None:
        ptr += tl.load(base_ptr)
    return ptr

@triton.jit
def kernel(a_ptr, b_ptr, base_ptr):
    a_ptr, b_ptr = moved(a_ptr, base_ptr), moved(b_ptr, base_ptr)
"""


def test_both_are_found():
    tree = ast.parse(GIVEN_BACK)
    assert given_back(tree) == ["moved"]
    assert in_tuples(tree, makers([tree])) == ["kernel", "kernel"]
