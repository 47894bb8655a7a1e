# SPDX-License-Identifier: Apache-2.0
"""The check of what an instruction returned whose function is not nnfront's own: external functions, registered kernels, ops of others.

Kernels trust types: a result that is smaller than declared would be read past its end. What is plainly right passes in about a microsecond;
all else goes to `check_returned`, which answers in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from nnfront.backends.backend import Frame
from nnfront.backends.registry import device_of
from nnfront.backends.table import others
from nnfront.dims import Dim, Symbol, evaluator
from nnfront.lower import (
    TENSORS,
    Run,
    Slot,
    Structure,
    TensorType,
    TupleType,
    Type,
    check_returned,
)

# From a frame and what a function returned to the same, if it is what was declared.
Check: TypeAlias = Callable[[Frame, Any], Any]


def returned_check(run: Run, slots: Sequence[Slot], dims: Mapping[Symbol, int], target: str) -> Check | None:
    """Return the check of an instruction's result; None where there is nothing to check. It raises RunError.

    `dims` has the slot of each dim; one that has no number yet is not asked for.
    """
    who = others(target, run)
    if not who or not run.outputs:
        return None
    device = device_of(target)
    type = _type_of(run.result, slots)
    handles = [slot for slot in run.inputs if slots[slot].type is not None]
    plain = _plain_check(type, dims, device)

    def check(frame: Frame, value: Any) -> Any:
        if not plain(frame, value):
            known = {symbol: frame[slot] for symbol, slot in dims.items() if frame[slot] is not None}
            check_returned(who, type, value, known, device, [frame[slot] for slot in handles])
        return value

    return check


def _type_of(result: Structure, slots: Sequence[Slot]) -> Type:
    """The type of a result that is taken apart so."""
    if not result.is_leaf:
        return TupleType(tuple(_type_of(part, slots) for part in result.fields))
    type = slots[result.slot].type
    assert type is not None
    return type


def _plain_check(
    type: Type, dims: Mapping[Symbol, int], device: torch.device
) -> Callable[[Frame, Any], bool]:
    """Return the question whether a value is right in a way that is quickly seen: tensors, and tuples of them."""
    if isinstance(type, TupleType):
        parts = [_plain_check(field, dims, device) for field in type.fields]

        def are_plain(frame: Frame, value: Any) -> bool:
            is_tuple = value.__class__ in (tuple, list) and len(value) == len(parts)
            return is_tuple and all(part(frame, v) for part, v in zip(parts, value, strict=True))

        return are_plain
    if not isinstance(type, TensorType):
        return lambda frame, value: False
    symbols = list(dict.fromkeys(s for size in type.shape if isinstance(size, Dim) for s in size.symbols))
    at, sizes, dtype = [dims[s] for s in symbols], evaluator(type.shape, symbols), getattr(torch, type.dtype)
    strided, is_cpu = torch.strided, device.type == "cpu"

    def is_plain(frame: Frame, value: Any) -> bool:
        return (
            value.__class__ in TENSORS
            and value.dtype is dtype
            and (value.is_cpu if is_cpu else value.device == device)
            and value.layout is strided
            and value.shape == sizes([frame[slot] for slot in at])
        )

    return is_plain
