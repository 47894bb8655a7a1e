# SPDX-License-Identifier: Apache-2.0
"""Parts of a tensor by position (`x[...]`), and tensors extended at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import torch

from nnfront.dims import Dim, Size, ceildiv, less, less_equal, maximum, minimum, same, to_size
from nnfront.errors import InferError, RunError
from nnfront.ir.op import op
from nnfront.ir.types import TensorType
from nnfront.ops.rules import Shape, integer, moving, require, sizes_of_shape

# One entry of a canonical index: ":" a whole axis, None a new axis of size 1, a position (drops its axis),
# or (start, stop, step) with 0 <= start and 0 <= stop <= size.
Entry: TypeAlias = str | Size | tuple[Size, Size, int] | None


@moving(view="always")
def getitem(x: TensorType, index: Any) -> TensorType:
    """Basic indexing, `x[index]`: positions, slices, None and `...`, one entry for each axis from the first.

    Negative ints count from the end; slices are cut to the axis, as in Python. A dim that might be negative counts from
    the front and is cut at 0. Positions must not be provably outside; one that is outside at run time is an error there.
    """
    shape: list[Size] = []
    axis = 0
    for entry in index:
        if entry is None:
            shape.append(1)
            continue
        if isinstance(entry, str):
            shape.append(x.shape[axis])
        elif isinstance(entry, tuple):
            shape.append(slice_length(*entry))
        axis += 1
    return TensorType((*shape, *x.shape[axis:]), x.dtype)


@getitem.normalize
def _(x: TensorType, index: Any) -> dict[str, Any]:
    entries = _fill_ellipsis(index if isinstance(index, tuple) else (index,), x.ndim)
    canonical: list[Entry] = []
    axis = 0
    for entry in entries:
        if entry is None:
            canonical.append(None)
            continue
        canonical.append(_entry(entry, x.shape[axis], axis))
        axis += 1
    while canonical and isinstance(canonical[-1], str):
        canonical.pop()
    return {"index": tuple(canonical)}


def _fill_ellipsis(index: tuple[Any, ...], ndim: int) -> list[Any]:
    """Return the entries with `...` replaced by as many whole axes as are missing."""
    count = sum(entry is not None and not isinstance(entry, EllipsisType) for entry in index)
    places = [i for i, entry in enumerate(index) if isinstance(entry, EllipsisType)]
    require(len(places) <= 1, "an index has at most one '...', got {}", len(places))
    require(count <= ndim, "{} entries for a tensor of {} axes", count, ndim)
    if not places:
        return list(index)
    return [*index[: places[0]], *[":"] * (ndim - count), *index[places[0] + 1 :]]


def _entry(entry: Any, size: Size, axis: int) -> Entry:
    """Return one entry in canonical form."""
    if isinstance(entry, slice):
        return _slice(entry.start, entry.stop, entry.step, size)
    if isinstance(entry, tuple) and len(entry) == 3:
        return _slice(*entry, size)
    if isinstance(entry, str):
        return ":" if entry == ":" else _position(to_size(entry), size, axis)
    if (
        isinstance(entry, bool)
        or not (isinstance(entry, Dim) or hasattr(entry, "__index__"))
        or hasattr(entry, "shape")
    ):
        raise InferError(
            f"axis {axis} cannot be indexed with {entry!r}",
            help="index with ints, dims and slices; use take or gather for tensors of positions",
        )
    return _position(entry if isinstance(entry, Dim) else integer(entry, "an index"), size, axis)


def _position(position: Size, size: Size, axis: int) -> Size:
    if isinstance(position, int):
        most = size if isinstance(size, int) else size.max
        outside = most is not None and not -most <= position < most
    else:
        outside = less(position, size) is False
    if outside:
        raise InferError(f"position {position} is outside axis {axis} of size {size}")
    return _from_front(position, size)


def _from_front(position: Size, size: Size) -> Size:
    """Return a position counted from the front, where a negative one counts from the end."""
    negative = position < 0 if isinstance(position, int) else less(position, 0) is True
    return size + position if negative else position


def _slice(start: Any, stop: Any, step: Any, size: Size) -> Entry:
    stride = 1 if step is None else integer(step, "the step of a slice")
    require(
        stride > 0, "the step of a slice must be positive, got {}", stride, help="use flip to reverse an axis"
    )
    low = 0 if start is None else _at_least_zero(_bound(start), size)
    high = size if stop is None else _at_most(_at_least_zero(_bound(stop), size), size)
    if isinstance(size, int):
        low = _at_most(low, size)  # of a dim the start may lie behind the end, which means the same: nothing
    if stride == 1 and isinstance(low, int) and low == 0 and same(high, size):
        return ":"
    return low, high, stride


def _bound(value: Any) -> Size:
    return to_size(value) if isinstance(value, Dim | str) else integer(value, "the bound of a slice")


def _at_least_zero(value: Size, size: Size) -> Size:
    """Return the bound of a slice counted from the front, and 0 for what lies before it."""
    value = _from_front(value, size)
    if isinstance(value, int):
        return max(value, 0)
    return value if less_equal(0, value) is True else maximum(value, 0)


def _at_most(value: Size, size: Size) -> Size:
    if isinstance(value, int) and isinstance(size, int):
        return min(value, size)
    return value if less_equal(value, size) is True else minimum(value, size)


def slice_length(start: Size, stop: Size, step: int) -> Size:
    """Return how many positions a slice in canonical form takes."""
    if isinstance(start, int) and isinstance(stop, int):
        return max(-(-(stop - start) // step), 0)
    distance = stop - start
    length = distance if step == 1 else ceildiv(distance, step)
    return length if less_equal(start, stop) is True else maximum(length, 0)


@getitem.reference
def _(x: torch.Tensor, index: Sequence[Any]) -> torch.Tensor:
    return x[tuple([_python_entry(entry) for entry in index])]


def _python_entry(entry: Any) -> Any:
    if isinstance(entry, str):
        return slice(None)
    # x[-3] of a dim that turned out to be 2; torch would count from the end again.
    if isinstance(entry, int) and entry < 0:
        raise RunError(f"getitem: a position lies {-entry} before the first element")
    return slice(*entry) if isinstance(entry, tuple) else entry


_MODES = ("constant", "reflect", "replicate", "circular")


@op(
    stricter="pad holds two numbers for each axis, and only a slice cuts",
    view="sometimes",
    moves=True,
    dtype_policy="follow",
)
def pad(x: TensorType, pad: Sequence[Size], mode: str = "constant", value: float = 0.0) -> TensorType:
    """Extend axes at their ends. `pad` is [before_0, after_0, before_1, after_1, ...]: **first axis first**, unlike torch.

    Axes that `pad` does not reach stay. mode: "constant" fills with `value`; "reflect" mirrors without repeating the edge
    (less than the axis); "replicate" repeats the edge; "circular" continues with the other end (at most the axis).
    """
    require(mode in _MODES, "unknown mode {!r}", mode, help=f"use one of {', '.join(_MODES)}")
    shape = list(x.shape)
    for axis in range(len(pad) // 2):
        before, after = pad[2 * axis], pad[2 * axis + 1]
        if mode != "constant":
            _require_source(mode, before, after, x.shape[axis], axis)
        shape[axis] = shape[axis] + before + after
    return TensorType(tuple(shape), x.dtype)


def _require_source(mode: str, before: Size, after: Size, size: Size, axis: int) -> None:
    """Refuse to extend an axis by more than it has to give."""
    for amount in (before, after):
        if isinstance(amount, int) and amount == 0:
            continue
        least = {"reflect": amount + 1, "replicate": 1, "circular": amount}[mode]
        require(
            less_equal(least, size) is not False,
            "mode {!r} cannot extend axis {} of size {} by {}",
            mode,
            axis,
            size,
            amount,
        )


@pad.normalize
def _(x: TensorType, pad: Any, mode: str = "constant", value: float = 0.0) -> dict[str, Any]:
    amounts: Shape = sizes_of_shape(pad)
    require(
        len(amounts) % 2 == 0,
        "pad has {} numbers, an odd count",
        len(amounts),
        help="give two for each axis: before, after",
    )
    require(len(amounts) <= 2 * x.ndim, "pad has {} numbers, x has only {} axes", len(amounts), x.ndim)
    for amount in amounts:
        require(
            less_equal(0, amount) is not False,
            "pad has a negative amount {}",
            amount,
            help="use a slice to cut",
        )
    full = (*amounts, *(0,) * (2 * x.ndim - len(amounts)))
    return {
        "pad": full,
        "mode": mode,
        "value": float(value) if x.dtype.startswith(("float", "bfloat")) else value,
    }


@pad.reference
def _(x: torch.Tensor, pad: Sequence[int], mode: str, value: float) -> torch.Tensor:
    if mode == "constant":
        last_first = [n for axis in reversed(range(len(pad) // 2)) for n in pad[2 * axis : 2 * axis + 2]]
        return torch.nn.functional.pad(x, last_first, value=value)
    for axis in range(len(pad) // 2):
        before, after = pad[2 * axis], pad[2 * axis + 1]
        if before or after:
            x = torch.index_select(x, axis, _sources(mode, before, after, x.shape[axis], x.device))
    return x


def _sources(mode: str, before: int, after: int, size: int, device: torch.device) -> torch.Tensor:
    """Return, for each position of an extended axis, the position that it copies."""
    position = torch.arange(-before, size + after, device=device)
    if mode == "circular":
        return position % size
    if mode == "replicate":
        return position.clamp(0, size - 1)
    return (size - 1) - (position.abs() - (size - 1)).abs()  # mirrored at 0, then at the last position
