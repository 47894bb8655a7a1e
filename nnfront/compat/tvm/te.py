# SPDX-License-Identifier: Apache-2.0
"""Tensor expressions of TVM as ops: TVM, where it is installed, traces the lambda, and each computation is read element by element as ops
over all elements at once.

    te.compute((b, 1, d), lambda i, _, k: x[i, s - 1, k])     becomes     x[:, -1] with an axis of 1

Every expression is a tensor that broadcasts over the axes of its computation: an axis is an `arange` along itself, an element read at the
axes themselves the tensor, at other positions a `take` of the flattened tensor. Of the two sides of a choice both are computed, so
positions are limited to where elements are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nnfront.compat.tvm import sizes
from nnfront.dims import Dim, Size, same
from nnfront.errors import WrongUse
from nnfront.nn.functional import op
from nnfront.nn.tensor import Tensor

# Nodes of two operands, by the name of their class; dtypes of both agree, which TVM sees to.
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": lambda a, b: a // b,
    "FloorMod": lambda a, b: a % b,
    "Max": op.maximum,
    "Min": op.minimum,
    "EQ": op.equal,
    "NE": op.not_equal,
    "LT": op.less,
    "LE": op.less_equal,
    "GT": op.greater,
    "GE": op.greater_equal,
    "And": op.logical_and,
    "Or": op.logical_or,
}
_CALLS: Mapping[str, Callable[..., Any]] = {
    **{
        f"tirx.{name}": getattr(op, name)
        for name in "exp log sqrt rsqrt cos sin tanh erf sigmoid floor ceil".split()
    },
    **{"tirx.fabs": op.abs, "tirx.pow": op.power, "prim.if_then_else": op.where},
}
# Reductions by the node that joins two elements: the op, and what leaves the other element as it is.
_REDUCED: Mapping[str, tuple[Callable[..., Any], float]] = {
    "Add": (op.sum, 0),
    "Mul": (op.prod, 1),
    "Max": (op.max, -math.inf),
    "Min": (op.min, math.inf),
}


def trace(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What `function` of TVM's tensors returns for these arguments: a tensor, or a list of them.

    args: tensors, dims, numbers. Raises WrongUse for an expression that no op computes, ImportError without TVM.
    """
    from tvm import te

    def argument(i: int, value: Any) -> Any:
        if isinstance(value, Tensor):
            return te.placeholder(list(value.shape), value.dtype, f"arg{i}")
        return sizes.variable(value) if isinstance(value, Dim) else value

    handed = [argument(i, value) for i, value in enumerate(args)]
    results = function(*handed)
    reader = _Reader({t.op: x for t, x in zip(handed, args, strict=True) if isinstance(x, Tensor)})
    return list(map(reader.tensor, results)) if isinstance(results, list | tuple) else reader.tensor(results)


class _Reader:
    """Tensors of TVM as tensors of ops; each operation is computed once."""

    def __init__(self, known: Mapping[Any, Any]) -> None:
        self.done: dict[tuple[Any, int], Any] = {(operation, 0): x for operation, x in known.items()}

    def tensor(self, t: Any) -> Any:
        key = (t.op, t.value_index)
        if key not in self.done:
            if type(t.op).__name__ != "ComputeOp":
                raise _unreadable(type(t.op).__name__)
            self.done[key] = self._computed(t)
        return self.done[key]

    def _computed(self, t: Any) -> Any:
        body, axes = t.op.body[t.value_index], list(t.op.axis)
        reduced = list(t.op.reduce_axis)
        element = _Element(self, [*axes, *reduced])
        shape = element.extents[: len(axes)]
        if type(body).__name__ != "Reduce":
            return op.astype(op.broadcast_to(element.value(body), shape), str(t.dtype))
        joined = body.combiner.result
        kind = type(joined[0]).__name__
        if len(joined) > 1 or kind not in _REDUCED:
            raise _unreadable(f"a reduction by {body.combiner}")
        reduce, neutral = _REDUCED[kind]
        source = op.broadcast_to(element.value(body.source[0]), element.extents)
        if str(body.condition) != "T.bool(True)":
            source = op.where(element.value(body.condition), source, neutral)
        along = list(range(len(axes), len(element.extents)))
        return op.astype(reduce(source, axis=along), str(t.dtype))

    def size(self, e: Any) -> Size | None:
        """The dim or int that an expression is; None if it says more than sizes."""
        kind = type(e).__name__
        if kind == "IntImm":
            return int(e.value)
        if kind == "Var":
            return sizes.dim_of(e)
        if kind == "Cast":
            return self.size(e.value)
        if kind in ("Add", "Sub", "Mul", "FloorDiv", "FloorMod"):
            a, b = self.size(e.a), self.size(e.b)
            if a is not None and b is not None:
                found: Size = _BINARY[kind](a, b)
                return found
        return None


class _Element:
    """Expressions over the axes of one computation, as tensors with as many axes or fewer, which broadcast."""

    def __init__(self, reader: _Reader, axes: Sequence[Any]) -> None:
        self.reader = reader
        self.extents = [_need(reader.size(axis.dom.extent)) for axis in axes]
        self.place = {axis.var: i for i, axis in enumerate(axes)}
        self.bound: dict[Any, Any] = {}

    def value(self, e: Any) -> Any:
        kind = type(e).__name__
        if kind in _BINARY:
            return _BINARY[kind](self.value(e.a), self.value(e.b))
        match kind:
            case "IntImm" | "FloatImm":
                return op.full((), e.value, _dtype(e))
            case "Var":
                return self._variable(e)
            case "Cast":
                return op.astype(self.value(e.value), _dtype(e))
            case "Select":
                return op.where(*map(self.value, (e.condition, e.true_value, e.false_value)))
            case "Not":
                return op.logical_not(self.value(e.a))
            case "Div" | "Mod":
                return self._towards_zero(kind, self.value(e.a), self.value(e.b))
            case "Let":
                self.bound[e.var] = self.value(e.value)
                return self.value(e.body)
            case "Call" if e.op.name == "te.tensor_load":
                return self._element(self.reader.tensor(e.args[0]), e.args[1:])
            case "Call" if e.op.name in _CALLS:
                return _CALLS[e.op.name](*map(self.value, e.args))
        raise _unreadable(e.op.name if kind == "Call" else kind)

    def _towards_zero(self, kind: str, a: Any, b: Any) -> Any:
        """The quotient and the remainder as in C: of integers they are rounded towards zero."""
        if "float" in a.dtype:
            return a / b if kind == "Div" else a - b * op.floor(a / b)
        quotient = op.floor_divide(op.abs(a), op.abs(b)) * op.sign(a) * op.sign(b)
        return quotient if kind == "Div" else a - b * quotient

    def _variable(self, var: Any) -> Any:
        if var in self.bound:
            return self.bound[var]
        if (dim := sizes.dim_of(var)) is not None:
            return op.astype(op.dim_value(dim), _dtype(var))
        if var not in self.place:
            raise _unreadable(f"the variable {var}")
        i = self.place[var]
        along: list[Size] = [1] * len(self.extents)
        along[i] = self.extents[i]
        return op.reshape(op.arange(self.extents[i], dtype=_dtype(var)), along)

    def _element(self, x: Any, positions: Sequence[Any]) -> Any:
        """x at these positions."""
        axes = [self._whole_axis(p, n) for p, n in zip(positions, x.shape, strict=True)]
        fixed = [self.reader.size(p) for p in positions]
        taken = [a for a in axes if a is not None]
        if len(set(taken)) == len(taken) and all(
            a is not None or s is not None for a, s in zip(axes, fixed, strict=True)
        ):
            index = tuple(
                slice(None) if a is not None else _from_the_end(s, n)
                for a, s, n in zip(axes, fixed, x.shape, strict=True)
            )
            rest = x[index] if any(a is None for a in axes) else x
            order = sorted(range(len(taken)), key=taken.__getitem__)
            sorted_axes = rest if order == list(range(len(order))) else op.permute_dims(rest, order)
            return op.reshape(sorted_axes, [n if i in taken else 1 for i, n in enumerate(self.extents)])
        flat: Any = op.full((), 0, "int64")
        for p, n in zip(positions, x.shape, strict=True):
            last = op.dim_value(n) - 1
            inside = op.maximum(op.minimum(op.astype(self.value(p), "int64"), last), 0)
            flat = flat * op.dim_value(n) + inside
        count = functools.reduce(lambda a, b: a * b, x.shape, 1)
        return op.take(op.reshape(x, (count,)), flat, axis=0)

    def _whole_axis(self, position: Any, size: Size) -> int | None:
        """The axis of which `position` runs over all of a tensor's axis of `size`."""
        while type(position).__name__ == "Cast":
            position = position.value
        i = self.place.get(position) if type(position).__name__ == "Var" else None
        return i if i is not None and same(self.extents[i], size) else None


def _from_the_end(position: Size | None, size: Size) -> Any:
    """A position that is a number of elements from the end says so, which needs no proof that it is inside."""
    back = _need(position) - size
    return back if isinstance(back, int) and back < 0 and isinstance(size, Dim) else position


def _dtype(e: Any) -> str:
    return str(e.ty.dtype if hasattr(e.ty, "dtype") else e.ty)


def _need(size: Size | None) -> Size:
    if size is None:
        raise _unreadable("a size that is computed of elements")
    return size


def _unreadable(what: str) -> WrongUse:
    return WrongUse(f"no op computes {what}")
