# SPDX-License-Identifier: Apache-2.0
"""Compile the check of a method's calls into one Python function.

For `prefill(tokens: int64[batch, seq], positions: int64[batch, seq])` with `seq` at most 8192 the function is, in essence,

    def check(frame, args):
        try:
            a0, a1, = args
            a0_0, a0_1, = a0.shape
            a1_0, a1_1, = a1.shape
            if a0.dtype is int64 and a0.is_cpu and ... and a0_1 <= 8192 and a1_0 == a0_0 and a1_1 == a0_1:
                frame[0] = a0; frame[1] = a1; frame[2] = a0_0; frame[3] = a0_1
                return
        except Exception:
            pass
        slow(frame, args)

It accepts what is plainly right. All else, what has to be converted and what is wrong, goes to `slow`, which answers in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from nnfront.backends.device import CPU
from nnfront.dims import Dim, Symbol, evaluator
from nnfront.lower import (
    MethodProgram,
    Place,
    ScalarType,
    ShapeType,
    StateType,
    Structure,
    TensorType,
    TupleType,
    Type,
    places,
)
from nnfront.runtime.bind_arguments import Found, Known, bind
from nnfront.state.contiguous import CACHES
from nnfront.state.type import layout

Check: TypeAlias = Callable[[list[Any], Sequence[Any]], None]


def compile_check(
    program: MethodProgram, known: Known, device: torch.device = CPU, left: Sequence[Found] = ()
) -> Check:
    """Return the function that checks the arguments of a call and puts them and the dims into a frame.

    `known` are the dims that the weights have bound, each with its number and the place that said it; `left` are the weights' sizes
    over other dims; `device` is where tensors have to be.
    """
    slow = _slow(program, known, left)
    if any(b.is_solved and b.symbol not in known for b in program.dims):
        return slow
    writer = _Writer(program, known, device, left)
    for i, argument in enumerate(program.arguments):
        writer.value(f"a{i}", argument.type, argument.structure)
    writer.sizes()
    return writer.finish(slow)


def _slow(program: MethodProgram, known: Known, left: Sequence[Found]) -> Check:
    def slow(frame: list[Any], args: Sequence[Any]) -> None:
        values, numbers = bind(program, args, known, left)
        for argument, value in zip(program.arguments, values, strict=True):
            put(frame, argument.structure, value)
        for binding in program.dims:
            frame[binding.slot] = numbers[binding.symbol]

    return slow


def put(frame: list[Any], structure: Structure, value: Any) -> None:
    """Store a value, nested as `structure`, in its slots."""
    if structure.is_leaf:
        frame[structure.slot] = value
        return
    for part, field in zip(structure.fields, value, strict=True):
        put(frame, part, field)


class _Writer:
    """Collects the source of the quick check."""

    def __init__(
        self, program: MethodProgram, known: Known, device: torch.device, left: Sequence[Found]
    ) -> None:
        self.program = program
        self.left = left
        self.device = device
        self.known = known
        self.unpack: list[str] = []
        self.conditions: list[str] = []
        self.stores: list[str] = []
        self.scope: dict[str, Any] = {
            "caches": CACHES,
            "device": device,
            "strided": torch.strided,
        }
        self.numbers: dict[Symbol, str] = {}  # what holds each dim

    def value(self, name: str, type: Type, structure: Structure) -> None:
        """Write the check of one value's kind, dtype and rank."""
        match type:
            case TensorType():
                axes = "".join(f"{name}_{i}, " for i in range(type.ndim))
                self.unpack.append(f"({axes}) = {name}.shape")
                self.scope[f"t_{type.dtype}"] = getattr(torch, type.dtype)
                self.conditions += [
                    f"{name}.dtype is t_{type.dtype}",
                    f"{name}.is_cpu" if self.device.type == "cpu" else f"{name}.device == device",
                    f"{name}.layout is strided",
                ]
            case ScalarType():
                self.conditions.append(
                    f"type({name}) is { {'bool': 'bool', 'int64': 'int', 'float64': 'float'}[type.dtype] }"
                )
            case TupleType():
                self.unpack.append(f"{name} = {name} if type({name}) in (tuple, list) else None")
                self.unpack.append(f"({''.join(f'{name}_{i}, ' for i in range(len(type.fields)))}) = {name}")
                for i, (part, field) in enumerate(zip(structure.fields, type.fields, strict=True)):
                    self.value(f"{name}_{i}", field, part)
            case StateType():
                self.scope[f"{name}_layout"] = layout(type)
                self.conditions += [f"type({name}) in caches", f"{name}.layout is {name}_layout"]
            case ShapeType():
                self.conditions.append("False")  # sizes given as a tuple of ints are left to the slow check
        if structure.is_leaf:
            self.stores.append(f"frame[{structure.slot}] = {name}")

    def sizes(self) -> None:
        """Write the check of every size, and the stores of the dims."""
        names = {argument.name: f"a{i}" for i, argument in enumerate(self.program.arguments)}
        found = [item for a in self.program.arguments for item in places(a.type, a.name)]
        spoken = {place: _spoken(names[place.argument], place) for place, _ in found}
        for binding in self.program.dims:
            if binding.symbol in self.known:
                self.numbers[binding.symbol] = str(self.known[binding.symbol][0])
                continue
            self.numbers[binding.symbol] = spoken[binding.place]
            self.facts(binding.symbol, spoken[binding.place], may_be_negative=binding.place.axis == "value")
        direct = {b.place for b in self.program.dims if b.symbol not in self.known}
        expressions = [(str(number), size) for _, size, number in self.left if isinstance(size, Dim)]
        for place, size in found:
            if place in direct:
                continue
            if isinstance(size, int):
                self.conditions.append(f"{spoken[place]} == {size}")
            elif len(size.symbols) == 1 and str(size) == size.symbols[0].name:
                self.conditions.append(f"{spoken[place]} == {self.numbers[size.symbols[0]]}")
            else:
                expressions.append((spoken[place], size))
        if expressions:
            self.expressions(expressions)
        self.stores += [f"frame[{b.slot}] = {self.numbers[b.symbol]}" for b in self.program.dims]

    def expressions(self, expressions: Sequence[tuple[str, Dim]]) -> None:
        """Write the check of sizes that are computed from dims."""
        sizes = [size for _, size in expressions]
        symbols = list(dict.fromkeys(s for size in sizes for s in size.symbols))
        self.scope["expected"] = evaluator(sizes, symbols)
        given = "".join(f"{self.numbers[s]}, " for s in symbols)
        self.conditions.append(
            f"expected(({given})) == ({''.join(f'{spoken}, ' for spoken, _ in expressions)})"
        )

    def facts(self, symbol: Symbol, number: str, *, may_be_negative: bool) -> None:
        """Write the check of a dim's range and divisor."""
        low, high, step = symbol.facts
        if low > 0 or may_be_negative:
            self.conditions.append(f"{number} >= {low}")
        if high is not None:
            self.conditions.append(f"{number} <= {high}")
        if step > 1:
            self.conditions.append(f"{number} % {step} == 0")

    def finish(self, slow: Check) -> Check:
        arguments = "".join(f"a{i}, " for i in range(len(self.program.arguments)))
        lines = [
            "def check(frame, args):",
            " try:",
            f"  ({arguments}) = args",
            *(f"  {line}" for line in self.unpack),
            f"  if {' and '.join(self.conditions) or 'True'}:",
            *(f"   {line}" for line in self.stores),
            "   return",
            " except Exception:",
            "  pass",
            " slow(frame, args)",
        ]
        self.scope["slow"] = slow
        exec("\n".join(lines), self.scope)
        check: Check = self.scope["check"]
        return check


def _spoken(argument: str, place: Place) -> str:
    """The Python expression for the number at a place."""
    owner = "_".join([argument, *map(str, place.path)])
    if place.axis == "value":
        return owner
    return f"{owner}.{place.axis}" if isinstance(place.axis, str) else f"{owner}_{place.axis}"
