# SPDX-License-Identifier: Apache-2.0
"""When a special case applies: what a user writes for a dim or an argument, in one form.

{"batch": 1}                          a dim is a number
{"batch": (2, 8)}                     a dim lies in a range, its ends included
{"seq": multiple_of(16)}              a dim is divisible
{"seq": [multiple_of(16), (16, 512)]} several conditions hold together
{"use_cache": True, "top_k": 5}       a host argument has a value
{"scale": 1.0}                        so has a tensor without axes
{"mask": zeros}                       every element of a tensor is 0
{"mask": causal}                      a tensor [..., queries, keys] is the causal mask: query i sees keys 0 ... i
{"mask": [zeros, causal]}             both at once

Function attributes hold conditions in plain form (`to_plain`): numbers, texts and tuples, so that they have a text of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from nnfront import dtypes
from nnfront.dims import Symbol, describe_facts, narrowed
from nnfront.errors import PassError, nearest
from nnfront.ir.types import ScalarType, TensorType, Type

Conditions: TypeAlias = Mapping[str, Any]
"""What a case says, by the name of the dim or argument."""


GENERAL: Final = "general"
"""The text of what runs where no case holds."""


@dataclass(frozen=True)
class multiple_of:
    """The condition that a dim is divisible by a number."""

    divisor: int


@dataclass(frozen=True)
class Zeros:
    """The condition that every element of a tensor is 0."""

    def __repr__(self) -> str:
        return "zeros"


@dataclass(frozen=True)
class Causal:
    """The condition that a tensor [..., queries, keys] is the causal mask: query i sees keys 0 ... i.

    A bool mask is True where a key is seen; a float mask is 0 there and `hidden` elsewhere. `causal(-1e9)` is the condition with
    another number for `hidden`.
    """

    hidden: float = -math.inf

    def __call__(self, hidden: float) -> Causal:
        """Return the condition for masks that hide a key by this number."""
        return Causal(float(hidden))

    def __repr__(self) -> str:
        return "causal" if self.hidden == -math.inf else f"causal({self.hidden})"


zeros: Final = Zeros()
causal: Final = Causal()

Value: TypeAlias = bool | int | float | Zeros | Causal


@dataclass(frozen=True)
class DimCase:
    """A dim lies in a range (least, greatest) and is a multiple of `divisor`.

    `symbol` has the facts that hold in the case, `own` those that hold in every call.
    """

    symbol: Symbol
    own: Symbol

    @property
    def bounds(self) -> tuple[int | None, int | None, int | None]:
        """(least, greatest, divisor) to ask for, None where every dim passes."""
        low, high, step = self.symbol.facts
        return low or None, high, step if step > 1 else None


@dataclass(frozen=True)
class ValueCase:
    """An argument has a value: a number, zeros, or the causal mask; all of `values` at once."""

    name: str
    type: Type
    values: tuple[Value, ...]

    @property
    def reads_tensor(self) -> bool:
        """Whether the check has to read a tensor."""
        return isinstance(self.type, TensorType)

    @property
    def number(self) -> int | float:
        """The number that a host argument is, 1 for True."""
        (value,) = set(self.values)
        assert isinstance(value, int | float)
        return int(value) if isinstance(value, bool) else value


@dataclass(frozen=True)
class Case:
    """All conditions of one case."""

    dims: tuple[DimCase, ...]
    values: tuple[ValueCase, ...]
    conditions: Conditions

    @property
    def text(self) -> str:
        """The case in words."""
        return case_text(self.conditions)


def read_case(
    owner: str, conditions: Conditions, dims: Mapping[str, Symbol], arguments: Mapping[str, Type]
) -> Case:
    """Return one case of the function `owner`, whose dims and inputs these are, by name.

    Raises PassError for a name that is neither, for what is no condition, and for what no input can meet.
    """
    if not isinstance(conditions, Mapping) or not conditions:
        got = "has no condition" if isinstance(conditions, Mapping) else f"is {conditions!r}, not a dict"
        raise PassError(f"a case of {owner} {got}", help="the general case needs no mention")
    found: list[DimCase] = []
    values: list[ValueCase] = []
    for name, condition in conditions.items():
        if condition == []:
            raise PassError(f"a case of {owner} says nothing about '{name}'", help="leave the name out")
        if name in dims:
            found.append(DimCase(_narrowed(owner, dims[name], condition), dims[name]))
        elif name in arguments:
            type = arguments[name]
            values.append(ValueCase(name, type, _values(owner, name, type, condition)))
        else:
            raise PassError(
                f"{owner} has no dim and no argument '{name}'",
                details=[
                    f"dims are {', '.join(dims) or 'none'}; arguments are {', '.join(arguments) or 'none'}"
                ],
                help=nearest(name, dict.fromkeys([*dims, *arguments])),
            )
    return Case(tuple(found), tuple(values), dict(conditions))


def parts_of(condition: Any) -> list[Any]:
    """Return the conditions that a list of them holds; a single one is alone."""
    return list(condition) if isinstance(condition, list) else [condition]


def joined(a: Conditions, b: Conditions) -> dict[str, Any]:
    """Return the conditions of both cases at once, each once."""
    joined = dict(a)
    for name, condition in b.items():
        parts = [*parts_of(joined[name]), *parts_of(condition)] if name in joined else [condition]
        parts = [part for i, part in enumerate(parts) if part not in parts[:i]]
        joined[name] = parts[0] if len(parts) == 1 else parts
    return joined


def dim_bounds(condition: Any) -> tuple[int, int | None, int] | None:
    """Return (least, greatest, divisor) that one condition on a dim asks for; None for what is no such condition."""
    if isinstance(condition, multiple_of) and type(condition.divisor) is int:
        return 0, None, condition.divisor
    if type(condition) is int:
        return condition, condition, 1
    if isinstance(condition, tuple) and len(condition) == 2 and all(type(end) is int for end in condition):
        return condition[0], condition[1], 1
    return None


def _narrowed(owner: str, symbol: Symbol, condition: Any) -> Symbol:
    """The symbol with the facts of the condition joined to its own."""
    found: Symbol | None = symbol
    for part in parts_of(condition):
        bounds = dim_bounds(part)
        if bounds is None:
            raise PassError(
                f"{part!r} is no condition on dim '{symbol.name}' of {owner}",
                help="give a number, a range (least, greatest), multiple_of(number), or a list of these",
            )
        found = narrowed(found, *bounds) if found and bounds[2] > 0 else None
    if found is None:
        raise PassError(
            f"'{condition_text(symbol.name, condition)}' never holds for {owner}",
            details=[f"{symbol.name} is {describe_facts(*symbol.facts)}"],
        )
    return found


def exclude(a: Value, b: Value) -> bool:
    """Whether no argument has both values. Masks and zeros may meet: where there is one key, nothing is hidden."""
    if isinstance(a, Causal) or isinstance(b, Causal):
        return False
    return (0 if isinstance(a, Zeros) else a) != (0 if isinstance(b, Zeros) else b)


def _values(owner: str, name: str, type: Type, condition: Any) -> tuple[Value, ...]:
    values = tuple(_value(owner, name, type, part) for part in parts_of(condition))
    if any(exclude(a, b) for a, b in itertools.combinations(values, 2)):
        raise PassError(f"'{condition_text(name, condition)}' never holds for {owner}")
    return values


def _value(owner: str, name: str, type_: Type, condition: Any) -> Value:
    if isinstance(type_, TensorType) and isinstance(condition, Causal):
        if type_.ndim >= 2 and (type_.dtype == "bool" or dtypes.is_float(type_.dtype)):
            return condition
        raise PassError(
            f"argument '{name}' of {owner} is no mask: it has {type_.ndim} axes of {type_.dtype}",
            help="a mask is bool or float, and its last two axes are queries and keys",
        )
    if isinstance(type_, TensorType) and type_.shape and isinstance(condition, Zeros):
        return condition
    if isinstance(type_, ScalarType) or (isinstance(type_, TensorType) and not type_.shape):
        wanted = bool if type_.dtype == "bool" else float if dtypes.is_float(type_.dtype) else int
        is_zero = isinstance(condition, Zeros) and isinstance(type_, TensorType)
        if is_zero or type(condition) is wanted or (wanted is float and type(condition) is int):
            return wanted(0 if is_zero else condition)
    raise PassError(
        f"{condition!r} is no condition on argument '{name}' of {owner}",
        help="give zeros or causal for a tensor, or a number for a host argument or a tensor without axes",
    )


# What a condition asks of a number or a torch tensor.


def asked_for(condition: Any, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a condition asks for, with the sizes, dtype and device of `like`."""
    if not isinstance(condition, Causal):
        return torch.full_like(like, 0 if isinstance(condition, Zeros) else condition)
    full = torch.full_like(like, like.dtype == torch.bool or condition.hidden)
    return full.tril() if like.dtype == torch.bool else full.triu(1)


def meets(value: Any, condition: Any) -> bool:
    """Whether the value of a dim or an argument is what one condition asks for."""
    if isinstance(value, torch.Tensor):
        return bool((value == asked_for(condition, value)).all())
    bounds = dim_bounds(condition)
    if bounds is None or isinstance(condition, int):
        return bool(value == condition)
    low, high, step = bounds
    return bool(low <= value and (high is None or value <= high) and value % step == 0)


# Text, and the plain form.


def case_text(conditions: Conditions) -> str:
    """Return a case in words: `batch == 1 and seq % 16 == 0`."""
    return " and ".join(condition_text(name, c) for name, c in conditions.items()) or "always"


def condition_text(name: str, condition: Any) -> str:
    """Return one condition in words."""
    if isinstance(condition, list):
        # What is given twice is said once, so that a case has one text however it was put together.
        return " and ".join(dict.fromkeys(condition_text(name, part) for part in condition))
    if isinstance(condition, multiple_of):
        return f"{name} % {condition.divisor} == 0"
    if isinstance(condition, tuple) and len(condition) == 2:
        return f"{condition[0]} <= {name} <= {condition[1]}"
    if isinstance(condition, Causal):
        return f"{name} is {condition!r}"
    return f"{name} == {0 if isinstance(condition, Zeros) else condition}"


def to_plain(conditions: Conditions) -> dict[str, Any]:
    """Return a case as a function attribute holds it."""
    return {name: _plain(condition) for name, condition in conditions.items()}


def from_plain(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case from its plain form; what is in the other form already stays."""
    return {name: _rich(condition) for name, condition in conditions.items()}


def _plain(condition: Any) -> Any:
    match condition:
        case list():
            return ("all", *map(_plain, condition))
        case multiple_of():
            return ("multiple_of", condition.divisor)
        case Zeros():
            return ("zeros",)
        case Causal():
            return ("causal", condition.hidden)
        case _:
            return condition


def _rich(condition: Any) -> Any:
    match condition:
        case ("all", *parts):
            return [_rich(part) for part in parts]
        case ("multiple_of", divisor):
            return multiple_of(divisor)
        case ("zeros",):
            return zeros
        case ("causal", hidden):
            return Causal(hidden)
        case _:
            return condition
