# SPDX-License-Identifier: Apache-2.0
"""An argument as what a method takes: tensors, numbers, tuples and caches of the right kind, dtype and rank.

Sizes are not looked at here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from nnfront.backends.device import CPU
from nnfront.backends.registry import device_of
from nnfront.errors import NnfrontError, RunError
from nnfront.lower import (
    MethodProgram,
    ScalarType,
    ShapeType,
    StateType,
    TensorType,
    TupleType,
    Type,
    type_text,
)
from nnfront.state.cache import Cache
from nnfront.state.type import describe, layout

Wrong: TypeAlias = Callable[..., RunError]
"""Makes the error of an argument from what is said of it behind its name."""


def convert(program: MethodProgram, name: str, type: Type, value: Any) -> Any:
    """Return the value as what the program takes. Raises RunError unless kind, dtype and rank are right."""

    def wrong(what: str, details: Sequence[str] = (), help: str = "") -> RunError:
        return call_error(program, f"argument {name} {what}", details=details, help=help)

    try:
        return _convert(program, name, type, value, wrong)
    except NnfrontError:
        raise
    except Exception as error:  # whatever the value's own class, numpy or torch says to it
        text = next(iter(str(error).splitlines()), "")
        what = f"is {_kind(value)} that cannot be read, expected {type_text(type)}"
        raise wrong(what, [f"{error.__class__.__name__}: {text}"]) from error


def _convert(program: MethodProgram, name: str, type: Type, value: Any, wrong: Wrong) -> Any:
    is_tuple = isinstance(value, (tuple, list))
    match type:
        case TensorType():
            return _tensor(type, value, device_of(program.target), wrong)
        case ScalarType():
            return _number(type, value, wrong)
        case TupleType():
            if not is_tuple or len(value) != len(type.fields):
                got = f"a tuple of {count_of(len(value), 'element')}" if is_tuple else _kind(value)
                raise wrong(f"is {got}, expected {'one' if is_tuple else 'a tuple'} of {len(type.fields)}")
            return tuple(
                convert(program, f"{name}[{i}]", t, v)
                for i, (t, v) in enumerate(zip(type.fields, value, strict=True))
            )
        case ShapeType():
            if not is_tuple or len(value) != len(type.sizes):
                raise wrong(f"is {_kind(value)}, expected {count_of(len(type.sizes), 'size')}")
            return tuple(int(v) for v in value)
        case StateType():
            if not isinstance(value, Cache):
                raise wrong(
                    f"is {_kind(value)}, expected a cache", help="make one with session.make_cache(...)"
                )
            if value.layout != layout(type):
                details = [f"got {describe(value.layout)}", f"expected {describe(layout(type))}"]
                raise wrong("is a cache of another model", details)
            return value
        case _:
            return value


def _tensor(type: TensorType, value: Any, device: torch.device, wrong: Wrong) -> torch.Tensor:
    expected = f"expected {type_text(type)}"
    if isinstance(value, (np.ndarray, np.generic)):
        value = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    elif isinstance(value, (bool, int, float)) and not type.shape:
        value = torch.tensor(value, dtype=_natural_dtype(value, type.dtype))
    if not isinstance(value, torch.Tensor):
        raise wrong(f"is {_kind(value)}, {expected}")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != type.dtype:
        raise wrong(f"is {dtype}, {expected}", help=f"convert it with .to(torch.{type.dtype})")
    if value.device != device or value.layout is not torch.strided or value.is_nested:
        form = "nested" if value.is_nested else str(value.layout)
        found = f"on {value.device}" if value.device != device else form
        where, move = ("the CPU", ".cpu()") if device == CPU else (str(device), f".to({str(device)!r})")
        raise wrong(f"is {found}, expected a dense tensor on {where}", help=f"move it with {move}")
    if value.ndim != type.ndim:
        raise wrong(f"has {count_of(value.ndim, 'axis')}, {expected}", [f"got {list(value.shape)}"])
    return value


def _natural_dtype(value: bool | int | float, dtype: str) -> torch.dtype:
    """A Python number becomes any tensor that holds its kind: 1 may stand for a float, 0.5 not for an integer."""
    wanted: torch.dtype = getattr(torch, dtype)
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64 if wanted is torch.bool else wanted
    return wanted if wanted.is_floating_point else torch.float64


def _number(type: ScalarType, value: Any, wrong: Wrong) -> bool | int | float:
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.ndim == 0):
        value = value.item()
    if type.dtype == "bool" and isinstance(value, bool):
        return value
    if type.dtype == "int64" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if type.dtype == "float64" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    words = {"bool": "True or False", "int64": "an int", "float64": "a float"}[type.dtype]
    raise wrong(f"is {_kind(value)}, expected {words}")


def _kind(value: Any) -> str:
    """What a value is, in words: `a list`, `an int`, `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def count_of(number: int, noun: str) -> str:
    """A number of things in words: `1 axis`, `2 axes`."""
    plural = {"axis": "axes"}.get(noun, f"{noun}s")
    return f"{number} {noun if number == 1 else plural}"


def call_error(program: MethodProgram, what: str, *, details: Sequence[str] = (), help: str = "") -> RunError:
    """An error about a call, with the method's signature."""
    signature = ", ".join(f"{a.name}: {type_text(a.type)}" for a in program.arguments)
    return RunError(
        f"{program.name}: {what}", details=[*details, f"signature: {program.name}({signature})"], help=help
    )
