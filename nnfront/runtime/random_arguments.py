# SPDX-License-Identifier: Apache-2.0
"""Random arguments for a method: dims inside their facts, values as a special case says."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from nnfront.backends.device import on_device
from nnfront.backends.registry import device_of
from nnfront.cases.conditions import asked_for, dim_bounds, from_plain, meets, parts_of
from nnfront.dims import Dim, Size, Symbol, evaluate, narrowed, parse
from nnfront.errors import RunError
from nnfront.lower import (
    Argument,
    Buffer,
    Run,
    ScalarType,
    StateType,
    TensorType,
    TupleType,
    Type,
    places,
)
from nnfront.state.cache import Cache
from nnfront.state.contiguous import make_cache

if TYPE_CHECKING:
    from nnfront.runtime.method import Method

SPREAD = 48
"""How far a dim without an upper bound may lie above its least number."""
TRIES = 500
"""How often sizes are drawn for a case before it counts as one that no input meets."""
FILLED = 3
"""Tokens that a cache holds before a call, where they fit."""


class RandomArguments:
    """Draws the arguments of a method. `dims` are numbers by name, `ranges` those of integer arguments; caches hold `filled` tokens."""

    def __init__(
        self,
        method: Method,
        dims: Mapping[str, int],
        ranges: Mapping[str, tuple[int, int]],
        seed: int,
        filled: int = FILLED,
    ) -> None:
        self.filled = filled
        self.method = method
        self.program = method.program
        self.device = device_of(method.program.target)
        self.given = {**dims, **method.load_dims()}
        self.ranges = {**_index_ranges(method), **ranges}
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        found = [
            (p, z) for a in self.program.arguments for p, z in places(a.type, a.name) if isinstance(z, Dim)
        ]
        symbols = {
            s.name: s for b in self.program.dims for s in (b.symbol,) if b.symbol.name not in self.given
        }
        self.elsewhere = {s.name for place, size in found if place.axis != "max_seq" for s in size.symbols}
        # A cache is to have room for what is appended: dims that only it has are drawn last, and large.
        self.roomy = {name: s for name, s in symbols.items() if name not in self.elsewhere}
        self.symbols = {name: s for name, s in symbols.items() if name in self.elsewhere}
        self.dims = {b.symbol.name for b in self.program.dims}

    def arguments(self, case: str | None, number: int) -> tuple[list[Any], dict[str, int]] | None:
        """Return arguments that meet a case (None: any), and the numbers of their dims; None if none are found that do.

        The first two are the least and the greatest sizes.
        """
        conditions = from_plain(self.program.cases[case]) if case is not None else {}
        of_dims = {name: parse(name) for name in conditions if self._is_dim(name)}
        # What a case says of a product of dims, or by two values at once, is found by trying.
        for each in (number, 0, *range(2, TRIES)):
            sizes = self._sizes(conditions, each)
            asked: dict[str, Any] = {name: evaluate(size, sizes) for name, size in of_dims.items()}
            if not _all_met(asked, conditions):
                continue
            args = {a.name: self._argument(a, conditions, sizes) for a in self.program.arguments}
            if _all_met({name: args[name] for name in conditions if name not in asked}, conditions):
                dims = {b.symbol.name: sizes[b.symbol.name] for b in self.program.dims}
                return [_moved(arg, self.device) for arg in args.values()], dims
        return None

    def _is_dim(self, name: str) -> bool:
        return name in self.dims or all(name != a.name for a in self.program.arguments)

    def _sizes(self, conditions: Mapping[str, Any], number: int) -> dict[str, int]:
        sizes = dict(self.given)
        said = dict(conditions)  # of dims; an argument that is one says it as well
        for argument in self.program.arguments:
            if isinstance(argument.type, ScalarType) and argument.name in conditions:
                said.setdefault(str(argument.type.value), conditions[argument.name])
        for name, symbol in self.symbols.items():
            sizes[name] = self._number(symbol, said.get(name), number)
        for name, symbol in self.roomy.items():
            room = self.filled + max([8, *sizes.values()])
            sizes[name] = self._number(symbol, said.get(name), 1, room)
        return sizes

    def _number(self, symbol: Symbol, condition: Any, number: int, least: int = 0) -> int:
        known = symbol
        for part in parts_of(condition) if condition is not None else ():
            known = narrowed(known, *(dim_bounds(part) or (None, None, None))) or known
        step, first = known.multiple_of, int(known.low) // known.multiple_of
        last = max(first, int(min(known.high, max(known.low + SPREAD, least, step)) // step))
        chosen = (first, last)[number] if number < 2 else self.random.randint(first, last)
        return chosen * step

    def _argument(self, argument: Argument, conditions: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
        type, parts = argument.type, parts_of(conditions.get(argument.name, []))
        if self._is_dim(argument.name):
            parts = []
        if parts and isinstance(type, TensorType):
            return asked_for(parts[0], torch.empty(_shape(type, sizes), dtype=getattr(torch, type.dtype)))
        if parts and isinstance(type, ScalarType) and type.value is None:
            return parts[0]
        return self._value(argument.name, type, sizes)

    def _value(self, name: str, type: Type, sizes: Mapping[str, int]) -> Any:
        match type:
            case TensorType():
                return self.tensor(type, sizes, self.generator, self.ranges.get(name, (0, 1)))
            case ScalarType():
                if type.value is not None:
                    return evaluate(type.value, sizes)
                choices = {"bool": (False, True), "int64": (0, 1, 2, 3), "float64": (0.0, 0.5, -1.5)}
                return self.random.choice(choices[type.dtype])
            case TupleType():
                return tuple(self._value(f"{name}[{i}]", field, sizes) for i, field in enumerate(type.fields))
            case StateType():
                return self._cache(type, sizes)
            case _:
                raise RunError(f"{self.program.name}: no random value for argument {name!r}")

    def _cache(self, type: StateType, sizes: Mapping[str, int]) -> Cache:
        """A cache with some tokens in it, random ones."""
        cache = make_cache(type, sizes, self.program.target)
        appended = max([1, *(n for name, n in sizes.items() if name in self.elsewhere)])
        filled = min(self.filled, cache.max_seq - appended)
        for layer in cache if filled > 0 else ():
            if layer.type.per_token:
                layer.append(*(self._noise(b, (layer.batch, filled)) for b in layer.type.per_token))
            for buffer in layer.type.per_sequence:
                layer.write(buffer.name, self._noise(buffer, (layer.batch,)), filled)
        return cache

    def _noise(self, buffer: Buffer, outer: tuple[int, ...]) -> torch.Tensor:
        """Random elements for what a cache keeps: [*outer, *shape]."""
        noise = torch.randn((*outer, *buffer.shape), generator=self.generator)
        return noise.to(self.device, getattr(torch, buffer.dtype))

    @staticmethod
    def tensor(
        type: TensorType, sizes: Mapping[str, int], generator: torch.Generator, integers: tuple[int, int]
    ) -> torch.Tensor:
        """Return a random tensor: normal floats, integers in a range with its ends."""
        shape, dtype = _shape(type, sizes), getattr(torch, type.dtype)
        if dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if not dtype.is_floating_point:
            return torch.randint(integers[0], integers[1] + 1, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)


def _all_met(values: Mapping[str, Any], conditions: Mapping[str, Any]) -> bool:
    return all(meets(value, part) for name, value in values.items() for part in parts_of(conditions[name]))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    return on_device(value, device)


def copied(value: Any) -> Any:
    """Return an argument that a call may write to."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    return value.clone() if isinstance(value, Cache) else value


def _index_ranges(method: Method) -> dict[str, tuple[int, int]]:
    """The integer arguments that select from a table of known length, and their ranges."""
    program, found = method.program, dict[str, tuple[int, int]]()
    names = {a.structure.slot: a.name for a in program.arguments if a.structure.is_leaf}
    for run in program.body.walk():
        if isinstance(run, Run) and run.op == "take" and run.inputs[1] in names:
            table = program.slots[run.inputs[0]].type
            size: Size = table.shape[run.attrs.get("axis") or 0] if isinstance(table, TensorType) else 0
            if isinstance(size, int) and size > 0:
                found[names[run.inputs[1]]] = (0, size - 1)
    return found


def _shape(type: TensorType, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(size, sizes) for size in type.shape)
