# SPDX-License-Identifier: Apache-2.0
"""What is computed on each element, moved, or seen under another shape, between the products of a token: rows of the tape.

By itself each of these is a call of torch; only next to others it is worth a row. Sums, products, quotients and conversions give the bits of torch; of functions
the last bit may differ, since torch has them from another library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeAlias

import torch

from nnfront.backends.cpu.in_c import besides, by_reference, in_c
from nnfront.backends.cpu.tape_builder import (
    Operand,
    Refused,
    TapeBuilder,
    Value,
    Write,
    attribute,
    demand,
)
from nnfront.backends.kernel import Kernel
from nnfront.ir import OPS
from nnfront.lower import Run
from nnfront.lower.reference import reference

# In the order of the enums in C.
_EXACT = (
    "copy",
    "add",
    "subtract",
    "subtract_from",
    "multiply",
    "divide",
    "divide_by",
    "equal",
    "where",
    "put",
)
_ORDERED = ("minimum", "maximum", "greater", "greater_equal", "less", "less_equal")
_UNARY = ("relu", "abs", "negative", "exp", "sigmoid", "silu", "tanh", "softplus", "rsqrt", "cos", "sin")
OPERATIONS = (*_EXACT, *_ORDERED, *_UNARY)
KINDS = (torch.bfloat16, torch.float32, torch.bool, torch.int32)
READ_KINDS = (*KINDS, torch.int64)
FLOATS = KINDS[:2]
AXES = 4

Number: TypeAlias = float | int
Steps: TypeAlias = Sequence[int]


def row_major(shape: Sequence[int]) -> list[int]:
    """Elements from one place along each axis to the next, of a tensor in one piece."""
    return list(accumulate(reversed(shape[1:]), int.__mul__, initial=1))[::-1] if shape else []


def emit(
    builder: TapeBuilder,
    operation: str,
    shape: Sequence[int],
    y: tuple[Value, Steps],
    x: tuple[Value, Steps],
    other: tuple[Value, Steps] | None = None,
    number: float = 0.0,
) -> None:
    """Write an operation over axes of these sizes, each operand with its steps along them."""
    kinds = [READ_KINDS.index(given[0].dtype) for given in (x, other or x, y)]
    steps = [given[1] for given in (x, other or (None, [0] * len(shape)), y)]
    axes: list[list[int]] = []
    for axis in zip(shape, *steps, strict=True):
        size, *along = axis
        if axes and all(before == step * size for before, step in zip(axes[-1][1:], along, strict=True)):
            axes[-1] = [axes[-1][0] * size, *along]
        elif size != 1:
            axes.append(list(axis))
    builder.limit_count(prod(shape), None, "elements")
    demand(len(axes) <= AXES, f"there are more than {AXES} axes")
    axes = [[1, 0, 0, 0]] * (AXES - len(axes)) + axes
    sizes = [size for part in zip(*axes, strict=True) for size in part]
    kind = OPERATIONS.index(operation), *sizes, *kinds, builder.threads, float(number)
    builder.call("elementwise", *kind, x[0], other and other[0], y[0])


def _demand_float(x: Value) -> None:
    demand(x.dtype in FLOATS, f"an operand is {x.dtype}")


def over(x: Value, shape: Sequence[int]) -> tuple[Value, Steps]:
    """A tensor in one piece, broadcast to a shape."""
    steps = [0 if size == 1 else step for size, step in zip(x.shape, row_major(x.shape), strict=True)]
    return x, [0] * (len(shape) - len(steps)) + steps


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that tensors of these have together."""
    rank = max(map(len, shapes))
    filled = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*filled, strict=True))


def copied(builder: TapeBuilder, x: Value, dtype: torch.dtype) -> Value:
    """x in another dtype: a piece of the tape's memory, to be released."""
    y = Value(builder.take(prod(x.shape) * dtype.itemsize), x.shape, dtype)
    emit(builder, "copy", x.shape, over(y, x.shape), over(x, x.shape))
    return y


def _binary(operation: str, reversed_: str, *, is_rounded: bool = False, is_bool: bool = False) -> Write:
    """Of two tensors, or a tensor and a number in either order, which is rounded to the tensor's dtype if `is_rounded`."""

    def write(builder: TapeBuilder, run: Run, x: Value | Number, other: Value | Number) -> Sequence[Operand]:
        name = operation
        if not isinstance(x, Value):
            x, other, name = other, x, reversed_
        if not isinstance(x, Value):
            raise Refused("neither operand is a tensor")
        _demand_float(x)
        if not isinstance(other, Value):
            demand(other is not None, "an operand is absent")
            y = builder.make(run.outputs[0], x.shape, torch.bool if is_bool else x.dtype)
            number = torch.tensor(other, dtype=x.dtype).item() if is_rounded else other
            if name == "divide_by":  # torch rounds the reciprocal
                emit(builder, name, x.shape, over(y, x.shape), over(x, x.shape), number=1)
                name, x = "multiply", y
            emit(builder, name, x.shape, over(y, x.shape), over(x, x.shape), number=number)
            return (y,)
        # What has no axes does not widen what has some.
        _demand_float(other)
        demand(
            x.dtype == other.dtype or (bool(x.shape) and bool(other.shape)), "one of two dtypes has no axes"
        )
        shape = _broadcast(x.shape, other.shape)
        dtype = torch.bool if is_bool else torch.promote_types(x.dtype, other.dtype)
        y = builder.make(run.outputs[0], shape, dtype)
        emit(builder, name, shape, over(y, shape), over(x, shape), over(other, shape))
        return (y,)

    return write


def _unary(operation: str) -> Write:
    def write(builder: TapeBuilder, run: Run, x: Value) -> Sequence[Operand]:
        _demand_float(x)
        demand(run.attrs.get("beta", 1.0) == 1, "beta is not 1")
        y = builder.make(run.outputs[0], x.shape, x.dtype)
        number = run.attrs.get("threshold", 20.0)
        emit(builder, operation, x.shape, over(y, x.shape), over(x, x.shape), number=number)
        return (y,)

    return write


def _astype(builder: TapeBuilder, run: Run, x: Value) -> Sequence[Operand]:
    dtype = getattr(torch, run.attrs["dtype"])
    demand(x.dtype in READ_KINDS and dtype in FLOATS, f"it is from {x.dtype} to {dtype}")
    if x.dtype == dtype:
        return (view(builder, run.outputs[0], x, x.shape),)
    y = builder.make(run.outputs[0], x.shape, dtype)
    emit(builder, "copy", x.shape, over(y, x.shape), over(x, x.shape))
    return (y,)


def _equal(builder: TapeBuilder, run: Run, x: Value, other: Value | Number) -> Sequence[Operand]:
    if not (isinstance(x, Value) and isinstance(other, Value)):
        raise Refused("an operand is no tensor")
    # Floats hold the integers that are compared with floats as torch does it, but not all others.
    are_read = {x.dtype, other.dtype} <= {*KINDS} and not {x.dtype, other.dtype}.isdisjoint(FLOATS)
    demand(are_read, f"operands are {x.dtype} and {other.dtype}")
    shape = _broadcast(x.shape, other.shape)
    y = builder.make(run.outputs[0], shape, torch.bool)
    emit(builder, "equal", shape, over(y, shape), over(x, shape), over(other, shape))
    return (y,)


def _where(
    builder: TapeBuilder, run: Run, condition: Value, x: Value | Number, other: Value | Number
) -> Sequence[Operand]:
    """What is given where the condition holds, over what is given where it does not."""
    given = [value for value in (x, other) if isinstance(value, Value)]
    are_alike = bool(given) and {value.dtype for value in given} <= {*FLOATS} & {given[0].dtype}
    demand(are_alike, "what is chosen from is not bfloat16, and not float32")
    are_there = isinstance(condition, Value) and all(value is not None for value in (x, other))
    demand(are_there, "an operand is absent")
    shape = _broadcast(condition.shape, *(value.shape for value in given))
    y = builder.make(run.outputs[0], shape, given[0].dtype)
    to, where = over(y, shape), over(condition, shape)
    if not isinstance(other, Value):
        emit(builder, "where", shape, to, where, over(given[0], shape), other)
        return (y,)
    emit(builder, "copy", shape, to, over(other, shape))
    if isinstance(x, Value):
        emit(builder, "put", shape, to, where, over(x, shape))
    else:
        emit(builder, "put", shape, to, where, number=x)
    return (y,)


def moved(
    builder: TapeBuilder, slot: int, x: Value, shape: Sequence[int], steps: Steps, offset: int = 0
) -> Value:
    """A copy of what lies at these steps of a tensor, `offset` elements behind its begin."""
    demand(x.dtype in KINDS, f"x is {x.dtype}")
    y = builder.make(slot, shape, x.dtype)
    part = Value(x.place + offset * x.dtype.itemsize, tuple(shape), x.dtype)
    copy(builder, shape, over(y, shape), (part, steps))
    return y


def copy(builder: TapeBuilder, shape: Sequence[int], y: tuple[Value, Steps], x: tuple[Value, Steps]) -> None:
    """Write that elements are moved; integers as if they were floats of their size."""
    bits = {torch.int32: torch.float32}
    y, x = ((replace(value, dtype=bits.get(value.dtype, value.dtype)), steps) for value, steps in (y, x))
    emit(builder, "copy", shape, y, x)


def view(builder: TapeBuilder, slot: int, x: Value, shape: Sequence[int], offset: int = 0) -> Value:
    """What lies in one piece in a tensor. Others than the tape see it as a view of torch's."""
    demand(slot not in builder.outlive, "it is seen by others")
    builder.hold(x.base)
    return Value(x.place + offset * x.dtype.itemsize, tuple(shape), x.dtype, x.base)


def _reshape(
    builder: TapeBuilder, run: Run, x: Value, shape: Sequence[int] | None = None
) -> Sequence[Operand]:
    shape = run.attrs["shape"] if shape is None else shape
    known = prod(size for size in shape if size != -1)
    demand(prod(x.shape) > 0, "there are no elements")
    shape = tuple(prod(x.shape) // known if size == -1 else size for size in shape)
    return (view(builder, run.outputs[0], x, shape),)


def _unsqueeze(builder: TapeBuilder, run: Run, x: Value) -> Sequence[Operand]:
    shape = list(x.shape)
    shape.insert(run.attrs["dim"], 1)
    return (view(builder, run.outputs[0], x, shape),)


def _split(builder: TapeBuilder, run: Run, x: Value, **sized: object) -> Sequence[Operand]:
    """Parts that lie in one piece are places in the whole, others are copied."""
    demand(not sized, "where it is split is computed")
    parts, axis = run.attrs["indices_or_sections"], attribute(run, "axis")
    width, inner = x.shape[axis], prod(x.shape[axis + 1 :])
    starts = list(range(0, width, width // parts)) if isinstance(parts, int) else [0, *parts]
    are_parts = sorted(starts) == starts and starts[-1] <= width and len(starts) == len(run.outputs)
    demand(are_parts, "parts lie over one another")
    is_whole, made = prod(x.shape[:axis]) == 1, []
    for slot, (start, end) in zip(run.outputs, pairwise([*starts, width]), strict=True):
        shape = (*x.shape[:axis], end - start, *x.shape[axis + 1 :])
        if is_whole:
            made.append(view(builder, slot, x, shape, start * inner))
        else:
            made.append(moved(builder, slot, x, shape, row_major(x.shape), start * inner))
    return made


def _concat(builder: TapeBuilder, run: Run, *parts: Value) -> Sequence[Operand]:
    axis, (first, *_) = attribute(run, "dim"), parts
    demand(all(part.dtype == first.dtype for part in parts), "parts differ in dtype")
    demand(first.dtype in KINDS, f"parts are {first.dtype}")
    width = sum(part.shape[axis] for part in parts)
    y = builder.make(run.outputs[0], (*first.shape[:axis], width, *first.shape[axis + 1 :]), first.dtype)
    steps, start = row_major(y.shape), 0
    for part in parts:
        at = Value(y.place + start * steps[axis] * y.dtype.itemsize, part.shape, y.dtype)
        if prod(part.shape):
            copy(builder, part.shape, (at, steps), over(part, part.shape))
        start += part.shape[axis]
    return (y,)


_multiply = _binary("multiply", "multiply")
_WRITTEN: dict[str, Callable[..., Sequence[Operand]]] = {
    "add": _binary("add", "add", is_rounded=True),
    "subtract": _binary("subtract", "subtract_from", is_rounded=True),
    "multiply": _multiply,
    "divide": _binary("divide", "divide_by"),
    "minimum": _binary("minimum", "minimum", is_rounded=True),
    "maximum": _binary("maximum", "maximum", is_rounded=True),
    "greater": _binary("greater", "less", is_rounded=True, is_bool=True),
    "greater_equal": _binary("greater_equal", "less_equal", is_rounded=True, is_bool=True),
    "less": _binary("less", "greater", is_rounded=True, is_bool=True),
    "less_equal": _binary("less_equal", "greater_equal", is_rounded=True, is_bool=True),
    **{name: _unary(name) for name in _UNARY},
    "square": lambda builder, run, x: _multiply(builder, run, x, x),
    "astype": _astype,
    "equal": _equal,
    "where": _where,
    "reshape": _reshape,
    "unsqueeze": _unsqueeze,
    "split": _split,
    "concat": _concat,
}
# Of which the last bit may differ from torch's: by itself a call is then what it is on a tape.
_FUNCTIONS = frozenset(_UNARY) - {"relu", "abs", "negative"}


def _held(run: Run, *operands: Any) -> int:
    """What a function's reference holds besides its result."""
    return by_reference(run, *operands) if OPS[run.op].scratch else 0


KERNELS = tuple(
    Kernel(op, op, in_c(write, reference), workspace=besides(write, _held), write=write)
    if op in _FUNCTIONS
    else Kernel(op, op, reference, write=write)
    for op, write in _WRITTEN.items()
)
