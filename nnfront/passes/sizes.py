# SPDX-License-Identifier: Apache-2.0
"""Replace the sizes in attributes and literals; `ir.map_sizes` does types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, get_args

from nnfront.dims import Dim, Size
from nnfront.ir import Atom, Scalar, Type, map_sizes

SizeMap: TypeAlias = Callable[[Size], Size]


def map_attr(value: Any, size: SizeMap) -> Any:
    """Return the value of an attribute with `size` applied to each dim in it."""
    if type(value) in (int, str, float, bool):
        return value
    if isinstance(value, Dim):
        return size(value)
    if isinstance(value, tuple | list):
        return tuple(map_attr(item, size) for item in value)
    if isinstance(value, Mapping):
        return {name: map_attr(item, size) for name, item in value.items()}
    return map_sizes(value, size) if isinstance(value, get_args(Type)) else value


def map_scalar(atom: Atom, size: SizeMap) -> Atom:
    """Return a literal with `size` applied if it is a dim, any other atom as it is."""
    return Scalar(size(atom.value)) if isinstance(atom, Scalar) and isinstance(atom.value, Dim) else atom
