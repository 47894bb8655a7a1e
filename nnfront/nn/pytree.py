# SPDX-License-Identifier: Apache-2.0
"""Nested Python values (tuples, lists, dicts) as a flat list of leaves and a structure that rebuilds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Leaf:
    """Stands for the next leaf in a structure."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "value"


LEAF = Leaf()


def flatten(value: Any, is_leaf: Callable[[Any], bool], leaves: list[Any]) -> Any:
    """Append the leaves of `value` to `leaves` and return its structure; what is neither leaf nor container stays in it."""
    if is_leaf(value):
        leaves.append(value)
        return LEAF
    if type(value) in (tuple, list):
        return type(value)(flatten(item, is_leaf, leaves) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(flatten(item, is_leaf, leaves) for item in value))
    if type(value) is dict:
        return {key: flatten(item, is_leaf, leaves) for key, item in value.items()}
    return value


def unflatten(structure: Any, leaves: Sequence[Any]) -> Any:
    """Rebuild a value from its structure and its leaves."""
    if structure is LEAF:  # the common case
        return leaves[0]
    return _rebuild(structure, iter(leaves))


def _rebuild(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is LEAF:
        return next(leaves)
    if type(structure) in (tuple, list):
        return type(structure)(_rebuild(item, leaves) for item in structure)
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(_rebuild(item, leaves) for item in structure))
    if type(structure) is dict:
        return {key: _rebuild(item, leaves) for key, item in structure.items()}
    return structure
