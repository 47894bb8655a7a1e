# SPDX-License-Identifier: Apache-2.0
"""How sums, products and conversions between other calls are written down: those of torch that round once, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

import torch

from nnfront.backends.cpu.norm import FEW
from nnfront.backends.cpu.tape_builder import NOWHERE, TapeBuilder, Value, Write, demand
from nnfront.lower import Run, Slot, TensorType

# In the order of the enum in C.
OPERATIONS = ("add", "multiply", "divide")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def is_elementwise(run: Run, slots: Sequence[Slot]) -> bool:
    """Whether all tensors of a call have one shape and dtypes that C has, and there is one ahead of a number."""
    first, *rest = run.inputs
    types = [slots[slot].type for slot in (first, *run.outputs)]
    types += [slots[slot].type for slot in rest if not is_number(slots[slot])]
    tensors = [type for type in types if isinstance(type, TensorType)]
    is_alike = len(tensors) == len(types) and len({type.shape for type in tensors}) == 1
    return is_alike and all(type.dtype in DTYPES for type in tensors)


def is_number(slot: Slot) -> bool:
    """Whether a slot is an operand that is a number."""
    return slot.kind == "constant" and isinstance(slot.value, int | float)


def _combine(
    builder: TapeBuilder, run: Run, x: Value, other: Value | float, *, operation: str
) -> Sequence[Value]:
    demand(0 < prod(x.shape) <= FEW)
    if isinstance(other, Value):
        demand(other.shape == x.shape)
        dtype, number, place, is_wide = (
            torch.promote_types(x.dtype, other.dtype),
            0.0,
            other.place,
            _is_wide(other),
        )
    else:
        dtype, number, place, is_wide = x.dtype, float(other), NOWHERE, False
    y = builder.make(run.outputs[0], x.shape, DTYPES.get(run.attrs.get("dtype", ""), dtype))
    kind = OPERATIONS.index(operation), _is_wide(x), is_wide, _is_wide(y), builder.threads, number
    builder.call("combine", prod(x.shape), *kind, x.place, place, y.place)
    return (y,)


def _is_wide(value: Value) -> bool:
    return value.dtype == torch.float32


def _square(builder: TapeBuilder, run: Run, x: Value) -> Sequence[Value]:
    return _combine(builder, run, x, x, operation="multiply")


def _astype(builder: TapeBuilder, run: Run, x: Value) -> Sequence[Value]:
    return _combine(builder, run, x, 1.0, operation="multiply")


ELEMENTWISE: Mapping[str, Write] = {
    **{name: partial(_combine, operation=name) for name in OPERATIONS},
    "square": _square,
    "astype": _astype,
}
"""Their writers, by kernel."""
