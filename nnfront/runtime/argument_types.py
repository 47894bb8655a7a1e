# SPDX-License-Identifier: Apache-2.0
"""An argument as what a method takes: tensors, numbers, tuples and caches of the right kind, dtype and rank.

Sizes are not looked at here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def convert(program: MethodProgram, name: str, type: Type, value: Any) -> Any:
    """Return the value as what the program takes. Raises RunError unless kind, dtype and rank are right."""
    try:
        return _convert(program, name, type, value)
    except NnfrontError:
        raise
    except Exception as error:  # whatever the value's own class, numpy or torch says to it
        text = next(iter(str(error).splitlines()), "")
        what = f"argument {name} is {_kind(value)} that cannot be read, expected {type_text(type)}"
        raise call_error(program, what, details=[f"{error.__class__.__name__}: {text}"]) from error


def _convert(program: MethodProgram, name: str, type: Type, value: Any) -> Any:
    match type:
        case TensorType():
            return _tensor(program, name, type, value)
        case ScalarType():
            return _number(program, name, type, value)
        case TupleType():
            if not isinstance(value, (tuple, list)) or len(value) != len(type.fields):
                is_tuple = isinstance(value, (tuple, list))
                got = f"a tuple of {count_of(len(value), 'element')}" if is_tuple else _kind(value)
                raise call_error(
                    program,
                    f"argument {name} is {got}, expected {'one' if is_tuple else 'a tuple'} of {len(type.fields)}",
                )
            return tuple(
                convert(program, f"{name}[{i}]", t, v)
                for i, (t, v) in enumerate(zip(type.fields, value, strict=True))
            )
        case ShapeType():
            if not isinstance(value, (tuple, list)) or len(value) != len(type.sizes):
                raise call_error(
                    program,
                    f"argument {name} is {_kind(value)}, expected {count_of(len(type.sizes), 'size')}",
                )
            return tuple(int(v) for v in value)
        case StateType():
            if not isinstance(value, Cache):
                raise call_error(
                    program,
                    f"argument {name} is {_kind(value)}, expected a cache",
                    help="make one with session.make_cache(...)",
                )
            if value.layout != layout(type):
                details = [f"got {describe(value.layout)}", f"expected {describe(layout(type))}"]
                raise call_error(program, f"argument {name} is a cache of another model", details=details)
            return value
        case _:
            return value


def _tensor(program: MethodProgram, name: str, type: TensorType, value: Any) -> torch.Tensor:
    expected = f"expected {type_text(type)}"
    if isinstance(value, (np.ndarray, np.generic)):
        value = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    elif isinstance(value, (bool, int, float)) and not type.shape:
        value = torch.tensor(value, dtype=_natural_dtype(value, type.dtype))
    if not isinstance(value, torch.Tensor):
        raise call_error(program, f"argument {name} is {_kind(value)}, {expected}")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != type.dtype:
        raise call_error(
            program,
            f"argument {name} is {dtype}, {expected}",
            help=f"convert it with .to(torch.{type.dtype})",
        )
    device = device_of(program.target)
    if value.device != device or value.layout is not torch.strided or value.is_nested:
        form = "nested" if value.is_nested else str(value.layout)
        found = f"on {value.device}" if value.device != device else form
        where = "the CPU" if device == CPU else str(device)
        raise call_error(
            program,
            f"argument {name} is {found}, expected a dense tensor on {where}",
            help="move it with .cpu()" if device == CPU else f"move it with .to({str(device)!r})",
        )
    if value.ndim != type.ndim:
        raise call_error(
            program,
            f"argument {name} has {count_of(value.ndim, 'axis')}, {expected}",
            details=[f"got {list(value.shape)}"],
        )
    return value


def _natural_dtype(value: bool | int | float, dtype: str) -> torch.dtype:
    """A Python number becomes any tensor that holds its kind: 1 may stand for a float, 0.5 not for an integer."""
    wanted: torch.dtype = getattr(torch, dtype)
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64 if wanted is torch.bool else wanted
    return wanted if wanted.is_floating_point else torch.float64


def _number(program: MethodProgram, name: str, type: ScalarType, value: Any) -> bool | int | float:
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        value = value.item()
    elif isinstance(value, np.generic):
        value = value.item()
    if type.dtype == "bool" and isinstance(value, bool):
        return value
    if type.dtype == "int64" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if type.dtype == "float64" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    words = {"bool": "True or False", "int64": "an int", "float64": "a float"}[type.dtype]
    raise call_error(program, f"argument {name} is {_kind(value)}, expected {words}")


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
