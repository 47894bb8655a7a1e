# SPDX-License-Identifier: Apache-2.0
"""Nested Python values (tuples, lists, dicts) as a flat list of leaves and a structure that rebuilds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Leaf:
    """Stands for the next leaf in a structure."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "value"


LEAF = Leaf()


def flatten(value: Any, is_leaf: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """Return the structure of `value` and its leaves; what is neither leaf nor container stays in the structure."""
    leaves: list[Any] = []

    def taken(leaf: Any) -> Leaf:
        leaves.append(leaf)
        return LEAF

    return _replaced(value, is_leaf, taken), leaves


def unflatten(structure: Any, leaves: Iterable[Any]) -> Any:
    """Rebuild a value from its structure and its leaves."""
    given = iter(leaves)
    return _replaced(structure, lambda part: part is LEAF, lambda _: next(given))


def _replaced(value: Any, is_leaf: Callable[[Any], bool], made: Callable[[Any], Any]) -> Any:
    """The value with what is made of each leaf in its place, in order."""
    if is_leaf(value):
        return made(value)
    if type(value) in (tuple, list):
        return type(value)(_replaced(item, is_leaf, made) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(item, is_leaf, made) for item in value))
    if type(value) is dict:
        return {key: _replaced(item, is_leaf, made) for key, item in value.items()}
    return value
