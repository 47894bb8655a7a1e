# SPDX-License-Identifier: Apache-2.0
"""When a special case applies: what a user writes for a dim or an argument, in one form.

{"batch": 1}                     a dim is a number
{"batch": (2, 8)}                a dim lies in a range, its ends included
{"seq": multiple_of(16)}         a dim is divisible
{"causal": True, "top_k": 5}     a host argument has a value
{"mask": zeros}                  every element of a tensor is 0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nnfront.dims import Symbol, describe_facts
from nnfront.errors import PassError
from nnfront.ir import Function, Param, ScalarType, TensorType


@dataclass(frozen=True)
class multiple_of:
    """The condition that a dim is divisible by a number."""

    divisor: int


class _Zeros:
    """The condition that every element of a tensor is 0."""

    def __repr__(self) -> str:
        return "zeros"


zeros: Final = _Zeros()


@dataclass(frozen=True)
class DimCase:
    """A dim lies in a range (least, greatest) and is a multiple of `divisor`; `symbol` has the facts that hold then."""

    symbol: Symbol

    @property
    def bounds(self) -> tuple[int | None, int | None, int | None]:
        """(least, greatest, divisor) to ask for, None where every dim passes."""
        low, high, step = self.symbol.facts
        return low or None, high, step if step > 1 else None

    @property
    def value(self) -> int | None:
        """The number that the dim is, if the range holds one only."""
        return self.symbol.min if self.symbol.min == self.symbol.max else None


@dataclass(frozen=True)
class ValueCase:
    """A parameter has a value: a number, or zeros."""

    param: Param
    value: bool | int | float | _Zeros


@dataclass(frozen=True)
class Case:
    """All conditions of one case."""

    dims: tuple[DimCase, ...]
    values: tuple[ValueCase, ...]
    text: str


def read_case(function: Function, conditions: Mapping[str, Any]) -> Case:
    """Return one case of a function. Raises PassError for a name that the function does not have and for what can never hold."""
    symbols = {symbol.name: symbol for symbol in function.symbols}
    params = {param.name: param for param in function.inputs}
    dims: list[DimCase] = []
    values: list[ValueCase] = []
    for name, condition in conditions.items():
        if name in symbols:
            dims.append(DimCase(_narrowed(function, symbols[name], condition)))
        elif name in params:
            values.append(ValueCase(params[name], _value(function, params[name], condition)))
        else:
            raise PassError(
                f"{function.name} has no dim and no argument '{name}'",
                details=[
                    f"dims are {', '.join(symbols) or 'none'}; arguments are {', '.join(params) or 'none'}"
                ],
            )
    if not conditions:
        raise PassError(
            f"a case of {function.name} has no condition", help="the general case needs no mention"
        )
    return Case(tuple(dims), tuple(values), " and ".join(_text(name, c) for name, c in conditions.items()))


def _narrowed(function: Function, symbol: Symbol, condition: Any) -> Symbol:
    """The symbol with the facts of the condition joined to its own."""
    low, high, step = symbol.facts
    if isinstance(condition, multiple_of):
        step = math.lcm(step, condition.divisor) if condition.divisor > 0 else 0
    elif type(condition) is int:
        low, high = max(low, condition), condition if high is None else min(high, condition)
    elif isinstance(condition, tuple) and len(condition) == 2 and all(type(end) is int for end in condition):
        low, high = max(low, condition[0]), condition[1] if high is None else min(high, condition[1])
    else:
        raise PassError(
            f"{condition!r} is no condition on dim '{symbol.name}' of {function.name}",
            help="give a number, a range (least, greatest), or multiple_of(number)",
        )
    if step < 1 or (high is not None and -(-low // step) * step > high):
        raise PassError(
            f"'{_text(symbol.name, condition)}' never holds for {function.name}",
            details=[f"{symbol.name} is {describe_facts(*symbol.facts)}"],
        )
    return Symbol(symbol.name, symbol.uid, low, high, step)


def _value(function: Function, param: Param, condition: Any) -> bool | int | float | _Zeros:
    if isinstance(param.type, TensorType) and isinstance(condition, _Zeros):
        return condition
    dtype = param.type.dtype if isinstance(param.type, ScalarType) else None
    if isinstance(condition, bool) and dtype == "bool":
        return condition
    if isinstance(condition, int) and not isinstance(condition, bool) and dtype == "int64":
        return condition
    if isinstance(condition, float) and dtype == "float64":
        return condition
    raise PassError(
        f"{condition!r} is no condition on argument '{param.name}' of {function.name}",
        help="give zeros for a tensor, or the value of a host argument",
    )


def _text(name: str, condition: Any) -> str:
    if isinstance(condition, multiple_of):
        return f"{name} % {condition.divisor} == 0"
    if isinstance(condition, tuple):
        return f"{condition[0]} <= {name} <= {condition[1]}"
    return f"{name} == {0 if condition is zeros else condition}"
