# SPDX-License-Identifier: Apache-2.0
"""`Parameter`: a tensor that the checkpoint holds under the parameter's attribute path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from nnfront.dims import Dim, evaluate, solve
from nnfront.errors import DimError, LoadError
from nnfront.holding import holding
from nnfront.ir import TensorType, type_text
from nnfront.nn.mode import active_mode, names_place
from nnfront.nn.shape import shape_of
from nnfront.nn.tensor import Tensor
from nnfront.ops.rules import dtype_name

_default_dtype: ContextVar[str] = ContextVar("default_dtype", default="float32")


def get_default_dtype() -> str:
    """Return the dtype that parameters get when none is given."""
    return _default_dtype.get()


def set_default_dtype(dtype: str) -> None:
    """Set the dtype that parameters get when none is given, in this thread or task."""
    _default_dtype.set(dtype_name(dtype))


def default_dtype(dtype: str) -> AbstractContextManager[str]:
    """Within it, parameters get this dtype when none is given."""
    return holding(_default_dtype, dtype_name(dtype))


@dataclass(slots=True)
class _Budget:
    parameters: int
    elements: int


_budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)


@contextmanager
def declaring_at_most(parameters: int, elements: int) -> Iterator[None]:
    """Within it, no more parameters are made and no more elements declared: a model that is built from numbers of others ends.

    Raises LoadError where one is too many.
    """
    try:
        with holding(_budget, _Budget(parameters, elements)):
            yield
    except _Exceeded:
        raise LoadError(
            "the model is larger than it can be",
            details=[f"it declares more than {parameters} parameters, or {elements} elements in them"],
            help="look for a number in config.json that is not the checkpoint's: of layers, of heads, of experts, or a width",
        ) from None


class _Exceeded(Exception):
    """A model has declared more than it may."""


class Parameter(Tensor):
    """A weight stored in the checkpoint. `shape` may hold dims; those are bound when weights are loaded.

    `attrs` is free for annotations that mutators and tools read.
    """

    __slots__ = ("_data", "attrs")

    @names_place
    def __init__(self, shape: Sequence[int | str | Dim], dtype: str | None = None) -> None:
        name = get_default_dtype() if dtype is None else dtype_name(dtype)
        super().__init__(TensorType(shape_of(shape, type(self).__name__), name), None)
        self._data: torch.Tensor | None = None
        self.attrs: dict[str, Any] = {}
        if (budget := _budget.get()) is not None:
            budget.parameters -= 1
            budget.elements -= prod(s for s in shape if isinstance(s, int))
            if budget.parameters < 0 or budget.elements < 0:
                raise _Exceeded

    @property
    def data(self) -> torch.Tensor | None:
        """The bound value for eager execution, None while there is none."""
        return self._data

    @data.setter
    def data(self, data: Any) -> None:
        self._allow_change("data")
        if data is None:
            self._data = None
            return
        if isinstance(data, Tensor):
            data = data.torch()
        if not isinstance(data, torch.Tensor):
            data = torch.from_numpy(np.asarray(data))
        wrong = self.mismatch(data)
        if wrong:
            raise LoadError("the value does not fit the parameter", details=[wrong])
        self._data = data.detach()

    def mismatch(self, data: torch.Tensor) -> str:
        """Say how `data` differs from the declaration, empty if it fits."""
        got = TensorType(tuple(data.shape), dtype_name(data.dtype))
        text = f"got {type_text(got)}, expected {type_text(self.type)}"
        if got.dtype != self.dtype or got.ndim != self.ndim:
            return text
        try:
            values = solve(list(zip(self.shape, data.shape, strict=True)))
            fits = all(evaluate(s, values) == n for s, n in zip(self.shape, data.shape, strict=True))
        except DimError:
            return text
        return "" if fits else text

    def to(self, dtype: str | None = None) -> None:  # type: ignore[override]
        """Change the declared dtype in place, and cast the value if one is bound."""
        if dtype is None:
            return
        self._allow_change("dtype")
        assert self._type is not None
        name = dtype_name(dtype)
        self._type = TensorType(self._type.shape, name)
        if self._data is not None:
            self._data = self._data.to(getattr(torch, name))

    def _allow_change(self, what: str) -> None:
        mode = active_mode.get()
        if mode is not None:
            mode.allow_change(self, what)

    def __repr__(self) -> str:
        return f"<Parameter {type_text(self.type)}{'' if self._data is None else ' bound'}>"


JOINED = "joined"


def joined(sizes: Sequence[int], *parameters: Parameter | None) -> None:
    """Say that parameters hold several things one after the other along axis 0, of these sizes: queries, keys and values, or gate and up.

    Ranks that divide a model cut each of them by itself.
    """
    for parameter in parameters:
        if parameter is not None:
            parameter.attrs[JOINED] = tuple(sizes)
