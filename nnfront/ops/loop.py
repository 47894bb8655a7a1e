# SPDX-License-Identifier: Apache-2.0
"""A loop over an axis, with values that are carried from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nnfront.dims import Size
from nnfront.errors import InferError
from nnfront.ir.op import op
from nnfront.ir.print_types import type_text
from nnfront.ir.types import FunctionName, FunctionType, TensorType, TupleType, Type
from nnfront.ops.rules import axis_of, require, require_same


@op(view="sometimes")
def scan(
    values: Sequence[Type], body: FunctionName, out: Any, carried: int, sliced: int, axis: int
) -> TupleType:
    """Call a function for each index along an axis, in order; what it carries goes into the next step.

    values: first those that are carried, `carried` of them; then tensors that a step gets the slice of, without the axis, `sliced`
    of them and at least one, as long as each other; then what every step gets as it is. `body` takes one of each and returns a tuple of what
    is carried, of the same types, and tensors. Returns, in a tuple of the type `out`, what is carried out of the last step, and the
    steps' tensors along the axis. No steps: what comes in, and tensors without elements.
    """
    assert isinstance(out, TupleType)
    length = _length(values, carried, sliced, axis)
    for i, (given, expected) in enumerate(zip(values[:carried], out.fields, strict=False)):
        require(
            given == expected, "value {} is carried as {}, given as {}", i, *map(type_text, (expected, given))
        )
    for made in out.fields[carried:]:
        require(
            isinstance(made, TensorType) and axis < made.ndim,
            "a step makes tensors, of {} axes or more",
            axis,
        )
        assert isinstance(made, TensorType)
        require_same(made.shape[axis], length, "the result has size {} on the axis where the loop has {}")
    return out


def _length(values: Sequence[Type], carried: int, sliced: int, axis: int) -> Size:
    """The number of steps."""
    found: Size | None = None
    for tensor in values[carried : carried + sliced]:
        if not isinstance(tensor, TensorType):
            raise InferError("only tensors have slices", details=[type_text(tensor)])
        size = tensor.shape[axis_of(axis, tensor.ndim)]
        found = size if found is None else found
        require_same(found, size, f"what is sliced has {{}} and {{}} elements on axis {axis}")
    assert found is not None
    return found


@scan.normalize
def _(values: Sequence[Type], body: Any, out: Any, carried: Any, sliced: Any, axis: Any) -> dict[str, Any]:
    require(isinstance(out, TupleType), "out is the type of a tuple")
    require(
        0 <= carried <= len(out.fields) and 0 < sliced <= len(values) - carried and axis >= 0,
        "{} values cannot be {} carried and {} sliced ones along axis {}",
        len(values),
        carried,
        sliced,
        axis,
    )
    return {"body": body, "out": out, "carried": carried, "sliced": sliced, "axis": axis}


@scan.calls
def _(
    values: Sequence[Type], body: FunctionName, out: Any, carried: int, sliced: int, axis: int
) -> FunctionType:
    steps = [_slice(tensor, axis) for tensor in values[carried : carried + sliced]]
    made = [_slice(tensor, axis) for tensor in out.fields[carried:]]
    return FunctionType(
        (*values[:carried], *steps, *values[carried + sliced :]), TupleType((*out.fields[:carried], *made))
    )


def _slice(tensor: Type, axis: int) -> TensorType:
    assert isinstance(tensor, TensorType)
    return TensorType((*tensor.shape[:axis], *tensor.shape[axis + 1 :]), tensor.dtype)


@scan.reference
def _(
    values: Sequence[Any],
    body: Callable[..., tuple[Any, ...]],
    out: Any,
    carried: int,
    sliced: int,
    axis: int,
) -> tuple[Any, ...]:
    state, sequences, rest = values[:carried], values[carried : carried + sliced], values[carried + sliced :]
    length = sequences[0].shape[axis]
    if length == 0:  # one step over zeros says what steps make
        empty = [x.new_zeros((*x.shape[:axis], *x.shape[axis + 1 :])) for x in sequences]
        made = body(*state, *empty, *rest)[carried:]
        return (*state, *[y.new_empty((*y.shape[:axis], 0, *y.shape[axis:])) for y in made])
    steps: list[Sequence[torch.Tensor]] = []
    for slices in zip(*[x.unbind(axis) for x in sequences], strict=True):
        results = body(*state, *slices, *rest)
        state = results[:carried]
        steps.append(results[carried:])
    return (*state, *[torch.stack(made, axis) for made in zip(*steps, strict=True)])
