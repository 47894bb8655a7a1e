# SPDX-License-Identifier: Apache-2.0
"""Ops about running rather than computing: printing, external functions, which case it is, and what a pass must not move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch

from nnfront.errors import InferError, RunError
from nnfront.ir.op import op
from nnfront.ir.operands import OperandType
from nnfront.ir.same_code import same_code
from nnfront.ir.types import ScalarType, TensorType, TupleType, Type
from nnfront.ops import print_format
from nnfront.ops.rules import moving, require

_EXTERNS: dict[str, Callable[..., Any]] = {}


@moving(view="always", in_order=True)
def stop_lift_params(x: TensorType) -> TensorType:
    """x itself; what follows is not moved to load time even if it needs only weights."""
    return x


@stop_lift_params.reference
def _(x: torch.Tensor) -> torch.Tensor:
    return x


@op(stricter="a tensor of one element has axes all the same")
def within(values: Sequence[OperandType], ranges: Sequence[Sequence[int | float | None]]) -> ScalarType:
    """Whether every number lies in its range: (least, greatest, divisor), None where there is no bound. A host boolean.

    values: dims, host numbers, and tensors without axes; True counts as 1. A range holds its ends.
    """
    for value in values:
        require(isinstance(value, ScalarType) or not value.shape, "a tensor with axes is no number")
    return ScalarType("bool")


@within.normalize
def _(values: Sequence[OperandType], ranges: Sequence[Sequence[int | float | None]]) -> dict[str, Any]:
    require(bool(values), "there is no value to compare")
    found = tuple(tuple(entry) for entry in ranges)
    require(
        len(found) == len(values) and all(len(entry) == 3 for entry in found),
        "{} values need as many ranges (least, greatest, divisor), got {}",
        len(values),
        found,
    )
    for low, high, step in found:
        require(low == low and high == high, "a bound is not a number")
        require(
            step is None or (type(step) is int and step > 0),
            "a divisor is an int of at least 1, got {}",
            step,
        )
    return {"ranges": found}


@within.implies
def _(values: Sequence[OperandType], ranges: Sequence[Sequence[int | float | None]]) -> list[Any]:
    return [
        (value.value, *entry)
        for value, entry in zip(values, ranges, strict=True)
        if isinstance(value, ScalarType) and value.value is not None and float not in map(type, entry)
    ]


@within.reference
def _(values: Sequence[Any], ranges: Sequence[Any]) -> bool:
    return all(map(_is_within, values, ranges))


def _is_within(value: Any, bounds: Sequence[Any]) -> bool:
    least, greatest, divisor = bounds
    number = value.item() if isinstance(value, torch.Tensor) else value
    above = least is None or number >= least
    return above and (greatest is None or number <= greatest) and (divisor is None or number % divisor == 0)


@op(is_pure=False)
def enter_case(case: str) -> TupleType:
    """Note that this case of a method runs: a session counts it. `case` is the case in words."""
    return TupleType(())


@enter_case.reference
def _(case: str) -> tuple[()]:
    return ()


@op(is_pure=False)
def print_(*tensors: OperandType, format: str = "") -> TupleType:
    """Print tensors when the method runs, on the standard output, one line each without a `format`.

    format: text with fields `{}`, `{1}` or, for single numbers, `{0:>8.3f}`: positions and specifications as `str.format` reads them,
    and nothing else of it.
    """
    print_format.check(format, tensors)
    return TupleType(())


@print_.reference
def _(*tensors: Any, format: str) -> tuple[()]:
    print(print_format.formatted(format, tensors) if format else "\n".join(map(str, tensors)), flush=True)
    return ()


@op(is_pure=False, view="sometimes")
def extern(name: str, args: Sequence[Type], out: Any) -> Type:
    """Call a function that is known by name when the method runs (see `register_extern`).

    args: tensors, objects, dims and numbers. out: what it returns, one placeholder or a tuple or list of them; several make a
    tuple. The function gets the arguments in order and returns its result, or a sequence of as many as `out` says.
    """
    result: Type = out
    return result


@extern.normalize
def _(name: str, out: Any) -> dict[str, Any]:
    require(
        isinstance(name, str) and name != "",
        "the name of an external function must be a text, got {!r}",
        name,
    )
    return {"out": _out_type(out)}


def _out_type(out: Any) -> Type:
    """Return the type that a placeholder, a type, or a sequence of them stands for."""
    if isinstance(out, list | tuple):
        return TupleType(tuple(map(_out_type, out)))
    found = out if isinstance(out, get_args(Type)) else getattr(out, "type", None)
    if not isinstance(found, get_args(Type)):
        raise InferError(
            f"out says nothing about the result: {out!r}",
            help="give nn.Tensor.placeholder(shape, dtype), or a tuple of them",
        )
    result: Type = found
    return result


@extern.reference
def _(name: str, args: Sequence[Any], out: Type) -> Any:
    result = find_extern(name)(*args)
    return tuple(result) if isinstance(out, TupleType) and isinstance(result, list) else result


def register_extern(name: str, function: Callable[..., Any]) -> None:
    """Let `extern(name, ...)` call `function` in this process. Raises RunError if the name stands for a function of other code."""
    known = _EXTERNS.get(name, function)
    if not same_code(known, function):
        raise RunError(f"the external function {name!r} is registered already", details=[f"as {known!r}"])
    _EXTERNS[name] = function


def find_extern(name: str) -> Callable[..., Any]:
    """Return the function registered under `name`. Raises RunError if there is none."""
    if name not in _EXTERNS:
        raise RunError(
            f"no external function is called {name!r}",
            help=f"call nnfront.register_extern({name!r}, function) before it runs",
        )
    return _EXTERNS[name]
