# SPDX-License-Identifier: Apache-2.0
"""A kernel in C as a function of tensors, and the memory that it takes: both by how the tape writes its calls, so what it takes is said once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.tape_builder import (
    MEMORY,
    LayerValue,
    Place,
    Refused,
    Tape,
    TapeBuilder,
    Value,
    Write,
)
from nnfront.backends.kernel import Bind
from nnfront.lower import Run, Structure
from nnfront.memory.allocations import Workspace
from nnfront.memory.layout import Layer, Layout

# Elements up to which there are few: what is in pieces is copied, and torch's calls cost more than what they do.
FEW = 1 << 18
# So many shapes of operands are remembered.
KNOWN = 256


def in_c(write: Write, otherwise: Bind) -> Bind:
    """The function of a kernel: C for operands that `write` takes, `otherwise` for all others."""

    def bind(run: Run) -> Callable[..., Any]:
        general, known = otherwise(run), dict[Any, "Tape | None"]()
        one = run if run.outputs else replace(run, result=Structure(0))

        def call(*operands: Any, **sized: Any) -> Any:
            key = (torch.get_num_threads(), *map(_sizes, operands), *sized.values())
            if key not in known:
                if len(known) >= KNOWN:
                    known.clear()
                known[key] = written(write, one, operands, sized)
            tape = known[key]
            tensors = [x for x in operands if isinstance(x, torch.Tensor)]
            if tape is None or not all(map(_is_readable, tensors)):
                return general(*operands, **sized)
            made = tape.run(map(torch.Tensor.contiguous, tensors))
            return made[0] if one.result.is_leaf else tuple(made)

        return call

    return bind


def written(write: Write, run: Run, operands: tuple[Any, ...], sized: dict[str, Any]) -> Tape | None:
    """A tape of one call with tensors as its memories; None where it is not for these operands."""
    if NATIVE is None:
        return None
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    places = (Value(Place(MEMORY + 1 + i), tuple(x.shape), x.dtype) for i, x in enumerate(tensors))
    values = [next(places) if isinstance(x, torch.Tensor) else x for x in operands]
    return _of_one(write, run, values, sized, MEMORY + 1 + len(tensors))


def _of_one(write: Write, run: Run, values: list[Any], sized: dict[str, Any], first: int) -> Tape | None:
    outlive = {slot: first + i for i, slot in enumerate(run.outputs)}
    builder = TapeBuilder(torch.get_num_threads(), outlive)
    try:
        write(builder, run, *values, **sized)
    except Refused:
        return None
    return builder.tape()


def besides(write: Write, otherwise: Callable[..., int]) -> Workspace:
    """What a kernel holds: in C what its call is given besides results, else what the other way does."""

    def held(run: Run, *operands: Any, **sized: Any) -> int:
        tape = None if NATIVE is None else _of_one(write, run, [*map(_value, operands)], sized, MEMORY + 1)
        return otherwise(run, *operands) if tape is None else tape.size

    return Workspace(held)


def _value(operand: Any) -> Any:
    if isinstance(operand, Layout):
        return Value(Place(MEMORY + 1), operand.shape, getattr(torch, operand.dtype))
    return LayerValue(operand, MEMORY + 1) if isinstance(operand, Layer) else operand


def _sizes(operand: Any) -> Any:
    return (operand.shape, operand.dtype) if isinstance(operand, torch.Tensor) else operand


def _is_readable(x: torch.Tensor) -> bool:
    return x.is_cpu and (x.is_contiguous() or x.numel() <= FEW)
