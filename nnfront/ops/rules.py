# SPDX-License-Identifier: Apache-2.0
"""What type rules are made of: refusals, broadcasting, promotion, axes and sizes.

Rules run once for every call of every export, so the common path makes no strings and does no dim arithmetic.
Sizes are compared through `nnfront.dims` only: inside a trace `==` on an undecided dim is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch

from nnfront import dtypes
from nnfront.dims import Dim, Size, equal, same, to_size
from nnfront.dtypes import Category
from nnfront.errors import InferError
from nnfront.ir.op import op
from nnfront.ir.operands import OperandType
from nnfront.ir.types import TensorType
from nnfront.quant_format import FORMATS, QuantFormat

Shape: TypeAlias = tuple[Size, ...]
Sizes: TypeAlias = Sequence[Size | str] | Size | str

# What attributes are, and what becomes of what authors write for them (`nnfront.ir.attributes.Canonical`).
Axis: TypeAlias = Annotated[int, lambda axis, name, x: axis_of(axis, x.ndim, name)]
Flag: TypeAlias = Annotated[bool, lambda value, *_: bool(value)]
Whole: TypeAlias = Annotated[int, lambda value, name, _: integer(value, name)]
Number: TypeAlias = Annotated[float, lambda value, *_: float(value)]
Length: TypeAlias = Annotated[Size, lambda value, *_: to_size(value)]
Dtype: TypeAlias = Annotated[str, lambda dtype, *_: dtype_name(dtype)]
OtherDtype: TypeAlias = Annotated[str, lambda dtype, _, x: unless(x.dtype, dtype)]  # than the first operand's
NewShape: TypeAlias = Annotated[Sizes, lambda shape, *_: require_not_negative(sizes_of_shape(shape))]

# Why rules refuse an axis that torch accepts.
NO_AXIS = "a tensor without axes has no axis 0 or -1, though torch accepts them"
FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2"})  # storage types: torch does no arithmetic on them
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})

moving = partial(op, moves=True, scratch=False, dtype_policy="follow")
"""Declares an op that moves elements, or writes what shapes say, and holds nothing else."""


def require(claim: bool, what: str, *values: object, help: str = "") -> None:
    """Raise InferError unless `claim` holds; `values` fill the braces of `what` (the text is only made if it is needed)."""
    if not claim:
        raise InferError(what.format(*values), help=help)


def broadcast(a: Shape, b: Shape) -> Shape:
    """Return the shape to which both shapes broadcast.

    Two sizes fit if they are provably equal or one of them is the int 1; a dim that merely might be 1 does not broadcast.
    """
    if a is b:
        return a
    if len(a) < len(b):
        a, b = b, a
    changed: list[Size] | None = None
    offset = len(a) - len(b)
    for i, y in enumerate(b, offset):
        x = a[i]
        if x is y or (isinstance(y, int) and y == 1):
            continue
        if isinstance(x, int) and x == 1:
            changed = list(a) if changed is None else changed
            changed[i] = y
        elif not same(x, y) and equal(x, y) is not True:
            raise InferError(
                f"sizes {x} and {y} do not broadcast (axis {i - len(a)})", help=differ_help(x, y)
            )
    return a if changed is None else tuple(changed)


def differ_help(a: Size, b: Size) -> str:
    """Return what to do about two sizes that are not provably equal: nothing to say if they provably differ."""
    if equal(a, b) is False:
        return ""
    return "nothing says that they are equal: use one dim for both in the spec"


def require_same(a: Size, b: Size, what: str, *values: object) -> None:
    """Raise InferError unless two sizes are provably equal; `{}` `{}` at the end of `what` stand for them."""
    if a is not b and not same(a, b) and equal(a, b) is not True:
        raise InferError(what.format(*values, a, b), help=differ_help(a, b))


def result_dtype(*operands: OperandType) -> str:
    """Return the dtype that torch gives to a result of these operands.

    Tensors with axes decide; tensors without axes, then Python numbers, only lift the result to a higher rung (bool, int, float).
    """
    ranked: list[str | None] = [None, None, None]  # with axes, without axes, numbers
    for x in operands:
        if isinstance(x, TensorType):
            rank, dtype = (0 if x.shape else 1), x.dtype
        else:
            rank, dtype = 2, "float32" if x.dtype == "float64" else x.dtype
        best = ranked[rank]
        ranked[rank] = dtype if best is None or best == dtype else dtypes.promote(best, dtype)
    result = _lift(ranked[0], _lift(ranked[1], ranked[2]))
    assert result is not None
    return result


def _lift(higher: str | None, lower: str | None) -> str | None:
    if higher is None or lower is None:
        return higher if lower is None else lower
    if higher == lower:
        return higher
    rung, other = dtypes.category(higher), dtypes.category(lower)
    if rung is not Category.FLOAT and (rung is Category.BOOL or other is Category.FLOAT):
        return dtypes.promote(higher, lower)
    return higher


def broadcast_operands(a: OperandType, b: OperandType) -> tuple[Shape, str]:
    """Return shape and dtype of an elementwise result of two operands, at least one of them a tensor."""
    if isinstance(a, TensorType):
        if isinstance(b, TensorType):
            shape = a.shape if a.shape is b.shape else broadcast(a.shape, b.shape)
            dtype = a.dtype if a.dtype == b.dtype else result_dtype(a, b)
        else:
            shape, dtype = a.shape, result_dtype(a, b)
    else:
        require(
            isinstance(b, TensorType),
            "one operand must be a tensor, got two numbers",
            help="compute with the numbers in Python",
        )
        assert isinstance(b, TensorType)
        shape, dtype = b.shape, result_dtype(a, b)
    if dtype in FLOAT8:
        raise InferError(f"no arithmetic in {dtype}", help="cast with astype first")
    return shape, dtype


def require_alike(**tensors: TensorType | None) -> None:
    """Raise InferError unless tensors, as far as there are any, have the dtype of the first."""
    (first, x), *others = tensors.items()
    for name, other in others:
        if x is not None and other is not None and other.dtype != x.dtype:
            what = f"{first} is {x.dtype}, {name} is {other.dtype}"
            raise InferError(what, help="cast one of them with astype")


def require_float(x: TensorType, name: str = "x") -> None:
    """Raise InferError unless `x` holds floating-point numbers that can be computed with."""
    if x.dtype not in _FLOATS:
        raise InferError(
            f"{name} must have a floating-point dtype, got {x.dtype}", help="cast with astype first"
        )


def require_number(x: TensorType, name: str = "x") -> None:
    """Raise InferError if `x` is bool or float8, which have no arithmetic."""
    if x.dtype == "bool" or x.dtype in FLOAT8:
        raise InferError(
            f"{name} must hold numbers that can be computed with, got {x.dtype}",
            help="cast with astype first",
        )


def require_integer(x: TensorType, name: str) -> None:
    """Raise InferError unless `x` holds integers."""
    if not dtypes.is_integer(x.dtype):
        raise InferError(f"{name} must have an integer dtype, got {x.dtype}", help="cast with astype first")


def as_float(dtype: str) -> str:
    """Return `dtype`, or float32 for integers and bool: the dtype of functions with real values."""
    if dtype in _FLOATS:
        return dtype
    if dtype in FLOAT8:
        raise InferError(f"no arithmetic in {dtype}", help="cast with astype first")
    return "float32"


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that references accumulate in: float32 for half types."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype that is given by name or as one of torch or numpy; raises InferError for anything else."""
    if isinstance(dtype, str | torch.dtype | torch.device):
        return dtypes.check(str(dtype).removeprefix("torch."))
    if dtype is not None:  # which numpy takes for float64
        try:
            return dtypes.check(np.dtype(dtype).name)  # type: ignore[call-overload]
        except TypeError:
            pass
    raise InferError(f"{dtype!r} is not a dtype", help=f"use one of {', '.join(dtypes.DTYPES)}")


def known_format(name: object, among: Collection[str] = FORMATS) -> QuantFormat:
    """Return the format of a name; raises InferError for one that is not among these."""
    names = ", ".join(among)
    require(isinstance(name, str) and name in among, "format must be one of {}, got {!r}", names, name)
    return FORMATS[str(name)]


def unless(usual: str, dtype: object) -> str | None:
    """Return the name of a dtype, None for the usual one, which is not stored."""
    name = dtype_name(dtype)
    return None if name == usual else name


def integer(value: object, name: str) -> int:
    """Return an attribute that must be an int, else raise InferError."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Dim):
        raise InferError(f"{name} must be an int, got {value!r}")
    return operator.index(value)


def axis_of(axis: object, ndim: int, name: str = "axis") -> int:
    """Return `axis` counted from the front, else raise InferError."""
    index = integer(axis, name)
    if not -ndim <= index < ndim:
        raise InferError(f"{name} {index} is out of range for a tensor of {ndim} axes")
    return index + ndim if index < 0 else index


def axes_of(axes: object, ndim: int, name: str = "axis") -> tuple[int, ...]:
    """Return the axes, one or several, counted from the front in their order; raises InferError for one named twice."""
    listed = axes if isinstance(axes, tuple | list) else (axes,)
    found = tuple([axis_of(a, ndim, name) for a in listed])
    require(len(set(found)) == len(found), "{} names an axis twice: {}", name, found)
    return found


def sizes_of_shape(shape: Sizes) -> Shape:
    """Return a shape that the author wrote as canonical sizes: ints, dims or strings, or a single one."""
    listed: Iterable[Any] = (
        shape
        if isinstance(shape, tuple | list)
        else (shape,)
        if isinstance(shape, int | str | Dim)
        else tuple(shape)
    )
    return tuple([s if type(s) is int else to_size(s) for s in listed])


def require_not_negative(shape: Shape) -> Shape:
    """Return a shape; raise InferError if a known size is negative; dims are not by their facts."""
    for size in shape:
        if isinstance(size, int) and size < 0:
            raise InferError(f"size {size} is negative")
    return shape


def positional(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a torch function as a reference of an op with one attribute, which torch calls otherwise."""

    def apply(x: torch.Tensor, **attrs: Any) -> torch.Tensor:
        return function(x, *attrs.values())

    return apply


def as_tensor(value: Any, like: Any) -> torch.Tensor:
    """Return an operand of a reference, tensor or number, as a tensor of the dtype that it has together with `like`."""
    dtype = torch.result_type(value, like)
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    device = like.device if isinstance(like, torch.Tensor) else None
    return torch.full((), value, dtype=dtype, device=device)  # filled there: nothing is copied from the host


def of_tensors(function: Callable[..., torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    """Return a torch function of two tensors as one of two operands, either of which may be a number."""

    def apply(a: Any, b: Any) -> torch.Tensor:
        return function(as_tensor(a, b), as_tensor(b, a))

    return apply
