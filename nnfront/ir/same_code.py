# SPDX-License-Identifier: Apache-2.0
"""Whether two functions are one that was read twice: a file that declares ops or kernels may be run again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def same_code(one: Any, two: Any) -> bool:
    """Say whether two callables do the same by their code, wherever it stands, and by the functions and plain values that it reads.

    Objects of other classes that both read under one name, tables and modules, count as the same if their class has the same name.
    """
    return _same(one, two, set())


def place_of(function: Any) -> str:
    """Say where a callable is written."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def _same(one: Any, two: Any, seen: set[tuple[int, int]]) -> bool:
    if one is two or (id(one), id(two)) in seen:
        return True
    if type(one).__qualname__ != type(two).__qualname__:
        return False
    if isinstance(one, (*_PLAIN, BuiltinFunctionType)):
        return bool(one == two)
    seen.add((id(one), id(two)))
    if isinstance(one, tuple):
        return len(one) == len(two) and all(_same(*pair, seen) for pair in zip(one, two, strict=True))
    if isinstance(one, partial):
        keywords = sorted(one.keywords) == sorted(two.keywords) and all(
            _same(value, two.keywords[name], seen) for name, value in one.keywords.items()
        )
        return keywords and _same((one.func, one.args), (two.func, two.args), seen)
    if isinstance(one, MethodType):
        return one.__self__ is two.__self__ and one.__func__ is two.__func__
    if not isinstance(one, FunctionType):
        return getattr(one, "__qualname__", None) == getattr(two, "__qualname__", None)
    return (
        _form(one.__code__) == _form(two.__code__)
        and str(inspect.signature(one)) == str(inspect.signature(two))
        and all(_same(*pair, seen) for pair in _read(one, two))
    )


def _form(code: Any) -> Any:
    """What a function does, without the lines and the file in which it is written."""
    if isinstance(code, CodeType):
        return code.co_code, code.co_names, code.co_varnames, tuple(map(_form, code.co_consts))
    return type(code), code


def _read(one: FunctionType, two: FunctionType) -> Iterator[tuple[Any, Any]]:
    """What two functions of one code read from around them."""
    for cell, other in zip(one.__closure__ or (), two.__closure__ or (), strict=True):
        yield cell.cell_contents, other.cell_contents
    for name in _names(one.__code__):
        if name in one.__globals__ or name in two.__globals__:
            yield one.__globals__.get(name), two.__globals__.get(name)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
