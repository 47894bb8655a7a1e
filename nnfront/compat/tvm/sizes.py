# SPDX-License-Identifier: Apache-2.0
"""Sizes as TVM's files use them: dims stand in its expressions, and the shape of a tensor equals a list.

A dim is a variable among TVM's expressions, one for each expression of dims, and can be told again from it: it has TVM's protocol for
values of other libraries once this is imported, so that lambdas and functions in TIR may name it. While a ported module is exported,
`x.shape == [n, 4]` and `x.shape + [1]` are what they are for lists.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from nnfront.dims import Dim, Size
from nnfront.holding import holding
from nnfront.nn.tensor import Tensor

_VARIABLES: dict[Dim, Any] = {}
_DIMS: dict[Any, Dim] = {}
_MAKING = threading.Lock()


def variable(dim: Dim) -> Any:
    """The int64 variable of TVM that stands for the dim."""
    from tvm import tirx

    with _MAKING:
        if dim not in _VARIABLES:
            made = _VARIABLES[dim] = tirx.Var(f"n{len(_VARIABLES)}", "int64")
            _DIMS[made] = dim
        return _VARIABLES[dim]


def dim_of(var: Any) -> Dim | None:
    """The dim that a variable of TVM stands for."""
    return _DIMS.get(var)


Dim.__tvm_ffi_object__ = variable  # type: ignore[attr-defined]


class Listed(tuple[Size, ...]):
    """A shape that equals the list, as well as the tuple, of its sizes."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, list) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Listed(found) if isinstance(index, slice) else found

    def __add__(self, other: Any) -> Any:
        return Listed((*self, *other))

    def __radd__(self, other: Any) -> Any:
        return Listed((*other, *self))


_LISTED: ContextVar[bool] = ContextVar("listed", default=False)


def listed_shapes() -> AbstractContextManager[bool]:
    """Give shapes that equal lists meanwhile."""
    return holding(_LISTED, True)


def shape(self: Tensor) -> tuple[Size, ...]:
    """One int or Dim for each axis."""
    sizes = self.type.shape
    return Listed(sizes) if _LISTED.get() else sizes


_SHAPE = property(shape)
_SHAPE.__set_name__(Tensor, "shape")  # type: ignore[attr-defined] # as in the class: errors say the name
Tensor.shape = _SHAPE  # type: ignore[assignment,method-assign]
