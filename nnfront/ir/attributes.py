# SPDX-License-Identifier: Apache-2.0
"""What the attributes of an op may be, by the annotations of its type rule.

Attributes come with IR from outside, and rules, references and kernels are written for what they declare: nothing else reaches them.
A value is checked as a call stores it: numbers, texts, dims, types, None, and tuples of those. Lists and dtypes of torch, which an author
may write, are brought to that form by the op before.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeAlias, Union

from nnfront.dims import Dim
from nnfront.files import shown_text
from nnfront.ir.budget import MAX_TEXT_CHARACTERS
from nnfront.ir.types import FunctionName, Type

RULE_ERRORS = (TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError)
"""What a type rule or normaliser, which is plain Python, raises on operands and attributes that it was not written for."""
INT64 = range(-(2**63), 2**63)
_TYPES = typing.get_args(Type)
_TUPLE = "a tuple, each entry "

Canonical: TypeAlias = Callable[[Any, str, Any], Any]
"""From what an author wrote, the attribute's name, and the type of the first operand, to what a call stores; `Annotated[int, canonical]` declares it."""


class Kind(NamedTuple):
    """What an attribute may be: a test, words for a message, and how it becomes canonical before it is tested."""

    fits: Callable[[Any], bool]
    words: str
    canonical: Canonical | None = None


def annotation_of(parameter: inspect.Parameter) -> str:
    """The annotation as it is written, whether the file postpones the evaluation of annotations or not."""
    if isinstance(parameter.annotation, str):
        return parameter.annotation
    return (
        inspect.formatannotation(parameter.annotation)
        .replace("nnfront.ir.types.", "")
        .replace("collections.abc.", "")
    )


def kinds_of(rule: Callable[..., Any], names: Iterable[str]) -> dict[str, Kind]:
    """Return the kind of each attribute of a rule. What is not annotated, or by a name that is not there, may be anything plain."""
    try:
        hints = typing.get_type_hints(rule, include_extras=True)
    except NameError:
        hints = {}
    return {name: _kind(hints.get(name, Any)) for name in names}


def shown(value: object) -> str:
    """A value for a message: not more of it than one can read."""
    text = repr(value) if type(value) in _KINDS else f"a {type(value).__name__}"
    return shown_text(text, 80)


def _kind(hint: Any) -> Kind:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _kind(args[0])._replace(canonical=args[1])
    if origin in (Union, UnionType):
        kinds = [_kind(each) for each in args]
        words = sorted({kind.words: None for kind in kinds}, key=lambda each: each.startswith(_TUPLE))
        canonical = next((kind.canonical for kind in kinds if kind.canonical is not None), None)
        return Kind(
            lambda value: any(kind.fits(value) for kind in kinds),
            " or ".join(words),
            canonical and (lambda value, *rest: None if value is None else canonical(value, *rest)),
        )
    if origin in (Sequence, list, tuple):
        item = _kind(args[0] if args else Any)
        return Kind(lambda value: type(value) is tuple and all(map(item.fits, value)), _TUPLE + item.words)
    return _KINDS.get(hint, _KINDS[Any])


def _is_int(value: Any) -> bool:
    return type(value) is int and value in INT64


def _is_number(value: Any) -> bool:
    return type(value) is float or _is_int(value)


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT_CHARACTERS


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return (
        _is_number(value)
        or _is_text(value)
        or type(value) in (bool, NoneType, Dim)
        or isinstance(value, _TYPES)
    )


_KINDS: dict[Any, Kind] = {
    Any: Kind(_is_plain, "numbers, texts, dims, types, None, or tuples of those"),
    bool: Kind(lambda value: type(value) is bool, "True or False"),
    int: Kind(_is_int, "an int"),
    float: Kind(_is_number, "a number"),
    str: Kind(_is_text, "a text"),
    Dim: Kind(lambda value: type(value) is Dim, "a dim"),
    NoneType: Kind(lambda value: value is None, "None"),
    FunctionName: Kind(lambda value: isinstance(value, FunctionName), "the name of a function"),
}
