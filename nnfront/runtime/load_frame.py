# SPDX-License-Identifier: Apache-2.0
"""Weights into a method's frame, and what they say about dims."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from nnfront.backends.device import CPU, on_device
from nnfront.dims import Size, Symbol
from nnfront.errors import LoadError, RunError
from nnfront.lower import Argument, Match, MethodProgram, Place, TensorType, type_text
from nnfront.runtime.bind_arguments import Known, observed, resolve
from nnfront.runtime.execute import Frame, initial_frame
from nnfront.runtime.fast_check import put

# Weights by role (`weight`, `transformed`) and name.
Values: TypeAlias = Mapping[str, Mapping[str, Any]]


def learn_dims(known: Known, program: MethodProgram, weights: Values) -> None:
    """Add the dims that a method's weights bind to those known. Raises LoadError for a size that contradicts another."""
    found: list[tuple[Place, Size, int]] = []
    for argument in program.weights:
        values = weights[argument.role]
        if argument.name not in values:
            raise LoadError(f"{program.name}: {argument.role} {argument.name!r} has no value")
        _check_kind(program, argument, values[argument.name])
        found += observed(argument, values[argument.name])
    bindings = [b for b in program.dims if b.place.is_weight and b.symbol not in known]
    try:
        bound = resolve(f"{program.name}: weight", found, bindings, dict(known))
    except RunError as error:
        raise LoadError(error.what, details=error.details) from None
    known.update((b.symbol, (bound[b.symbol][0], f"weight {b.place}")) for b in bindings)


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
