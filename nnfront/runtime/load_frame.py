# SPDX-License-Identifier: Apache-2.0
"""Weights into a method's frame, and what they say about dims."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from nnfront.backends.device import CPU, on_device
from nnfront.dims import Dim, Symbol, determined
from nnfront.errors import LoadError, RunError
from nnfront.lower import Argument, DimBinding, Match, MethodProgram, TensorType, bound_at_load, type_text
from nnfront.runtime.bind_arguments import Found, Known, observed, resolve, titles
from nnfront.runtime.execute import Frame, initial_frame
from nnfront.runtime.fast_check import put

# Weights by role (`weight`, `transformed`) and name.
Values: TypeAlias = Mapping[str, Mapping[str, Any]]


def learn_dims(known: Known, program: MethodProgram, weights: Values) -> bool:
    """Add the dims that a method's weights bind to those known; return whether there were any.

    Sizes over known dims are checked. Raises LoadError for one that contradicts another.
    """
    for argument in program.weights:
        values = weights[argument.role]
        if argument.name not in values:
            raise LoadError(f"{program.name}: {argument.role} {argument.name!r} has no value")
        _check_kind(program, argument, values[argument.name])
    found = list(_observed(program, weights))
    places = [(place, size) for place, size, _ in found if isinstance(size, Dim)]
    told = determined([size for _, size in places], known)
    bindings = [DimBinding(symbol, -1, *places[index]) for symbol, index in told.items()]
    closed = [item for item in found if not _is_open(item, known.keys() | told)]
    try:
        bound = resolve(titles(program), closed, bindings, dict(known))
    except RunError as error:
        raise LoadError(error.what, details=error.details) from None
    known.update((b.symbol, (bound[b.symbol][0], f"weight {b.place}")) for b in bindings)
    return bool(told)


def left_open(program: MethodProgram, weights: Values, known: Known) -> list[Found]:
    """Return the sizes of a method's weights over dims that only the arguments of a call bind: each call checks them.

    Raises LoadError for a dim that loading was to bind.
    """
    at_load = bound_at_load(program.dims)
    for binding in program.dims:
        if binding.symbol in at_load and binding.symbol not in known:
            raise LoadError(
                f"{program.name}: no weight says what '{binding.symbol}' is",
                details=[f"expected {binding.place} to say it"],
                help="give load(...) the checkpoint's own weights",
            )
    return [item for item in _observed(program, weights) if _is_open(item, known)]


def _observed(program: MethodProgram, weights: Values) -> Iterator[Found]:
    for argument in program.weights:
        yield from observed(argument, weights[argument.role][argument.name])


def _is_open(item: Found, known: Container[Symbol]) -> bool:
    _, size, _ = item
    return isinstance(size, Dim) and any(symbol not in known for symbol in size.symbols)


def loaded_frame(program: MethodProgram, weights: Values, known: Known, device: torch.device = CPU) -> Frame:
    """Return a frame with constants, weights and their dims in place; the weights are on the device already."""
    frame = [on_device(value, device) for value in initial_frame(program.slots)]
    for argument in program.weights:
        put(frame, argument.structure, weights[argument.role][argument.name])
    for binding in program.dims:
        if binding.symbol in known:
            frame[binding.slot] = known[binding.symbol][0]
    return frame


def _check_kind(program: MethodProgram, weight: Argument, value: Any) -> None:
    """Raise LoadError for a tensor of another dtype or rank."""
    if isinstance(weight.type, TensorType) and isinstance(value, torch.Tensor):
        got = f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
        if value.ndim != weight.type.ndim or got.partition("[")[0] != weight.type.dtype:
            what = (
                f"{program.name}: {weight.role} {weight.name!r} is {got}, expected {type_text(weight.type)}"
            )
            raise LoadError(what)


def matched_dims(program: MethodProgram) -> dict[Symbol, int]:
    """The slots of the dims that a method defines while it runs."""
    return {symbol: slot for i in program.body.walk() if isinstance(i, Match) for symbol, slot in i.defines}
