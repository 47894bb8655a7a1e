# SPDX-License-Identifier: Apache-2.0
"""The check of what an instruction returned whose function is not nnfront's own: external functions, registered kernels, ops of others.

Kernels trust types: a result that is smaller than declared would be read past its end. The check takes some 4 us of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from nnfront.backends.backend import Frame
from nnfront.backends.registry import device_of
from nnfront.backends.table import others
from nnfront.dims import Symbol
from nnfront.lower import Run, Slot, Structure, TupleType, Type, check_returned

# From a frame and what a function returned to the same, if it is what was declared.
Check: TypeAlias = Callable[[Frame, Any], Any]


def returned_check(run: Run, slots: Sequence[Slot], dims: Mapping[Symbol, int], target: str) -> Check | None:
    """Return the check of an instruction's result; None where there is nothing to check. It raises RunError.

    `dims` has the slot of each dim; one that has no number yet is not asked for.
    """
    who = others(target, run)
    if not who or not run.outputs:
        return None
    type, device = _type_of(run.result, slots), device_of(target)
    handles = [slot for slot in run.inputs if slots[slot].type is not None]

    def check(frame: Frame, value: Any) -> Any:
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
