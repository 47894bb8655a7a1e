# SPDX-License-Identifier: Apache-2.0
"""`Tensor`: what a module computes with. One class, three kinds of content.

    traced    a variable of the function that is being traced
    formula   an op over parameters and other formulas, made outside a trace: a derived weight
    value     a torch tensor: eager execution, and constants

`apply` is the one door through which every op goes; what it does depends on the mode that is active (tracing, eager, none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import torch

from nnfront import ops
from nnfront.dims import Dim, Size
from nnfront.errors import InferError, TraceError, UnknownName
from nnfront.ir import Op, ScalarType, TensorType, TupleType, Type, Var, sizes_of, type_text
from nnfront.nn import elsewhere, foreign
from nnfront.nn.mode import active_mode, canonical, infer, names_place, out_of_trace, outside_place
from nnfront.nn.shape import shape_of
from nnfront.nn.source_location import user_place
from nnfront.ops.returned import run_reference
from nnfront.ops.rules import dtype_name

Number: TypeAlias = bool | int | float


@dataclass(frozen=True, slots=True, eq=False)
class FormulaCall:
    """One op of a formula; its operands are parameters, formulas, values and numbers. Compared by identity."""

    op: Op
    args: tuple[Any, ...]
    attrs: Mapping[str, Any]
    where: str
    _known: list[tuple[Sequence[Type | None], Mapping[str, Any], Type]] = field(default_factory=list)

    def result_type(self) -> Type:
        """Return the type, of operands as they are now: a parameter's dtype may have changed meanwhile."""
        return self.type_of(operand_types(self.args), self.attrs)

    def type_of(self, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Type:
        """Infer the type from those of the operands; the last answer is kept, for most formulas are asked several times."""
        for seen, seen_attrs, known in self._known:
            if attrs is seen_attrs and all(map(is_, types, seen)):
                return known
        result = infer(self.op, types, attrs, self.where)
        self._known[:] = [(types, attrs, result)]
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """The content of a derived tensor: a call, and which of its results if it has several."""

    call: FormulaCall
    index: int | None = None


class Tensor:
    """A tensor in a module. Make one with an op, `Tensor.from_const` or `nn.Parameter`.

    Operators are elementwise as in torch and numpy (`==` too), `@` is matmul, `[]` is basic indexing.
    """

    __slots__ = ("__weakref__", "_type", "content")

    def __init__(self, type: TensorType | None, content: Var | Formula | torch.Tensor | None) -> None:
        self._type = type
        self.content = content

    @staticmethod
    @names_place
    def placeholder(shape: Sequence[int | str | Dim], dtype: str, name: str = "tensor") -> Tensor:
        """Return a tensor that has only a type, to say what an external function returns."""
        return Tensor(TensorType(shape_of(shape, "placeholder"), dtype_name(dtype)), None)

    @staticmethod
    def from_const(data: Any) -> Tensor:
        """Return a constant: a numpy array, a torch tensor or a nested list."""
        if isinstance(data, torch.Tensor):
            return value(data)
        try:
            return value(torch.as_tensor(np.asarray(data)))
        except (TypeError, ValueError):
            raise InferError(
                f"Tensor.from_const: no tensor can be made of {data!r}",
                where=outside_place(),
                help="give a torch tensor, a numpy array, or nested lists of numbers",
            ) from None

    @staticmethod
    def from_scalar(data: Number, dtype: str) -> Tensor:
        """Return a constant without axes."""
        return value(torch.tensor(data, dtype=getattr(torch, dtype_name(dtype))))

    @property
    def type(self) -> TensorType:
        """Shape and dtype."""
        if self._type is not None:
            return self._type
        assert isinstance(self.content, Formula)
        result = self.content.call.result_type()
        if self.content.index is not None:
            assert isinstance(result, TupleType)
            result = result.fields[self.content.index]
        assert isinstance(result, TensorType)
        return result

    @property
    def shape(self) -> tuple[Size, ...]:
        """One int or Dim for each axis."""
        return self.type.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.type.shape)

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return self.type.dtype

    @property
    def is_derived(self) -> bool:
        """Whether this is a formula over parameters."""
        return isinstance(self.content, Formula)

    def torch(self) -> torch.Tensor:
        """Return the torch tensor of a value. Raises TraceError for a tensor that has none."""
        if not isinstance(self.content, torch.Tensor):
            raise TraceError(
                f"{self!r} has no value",
                where=outside_place(),
                help="its value exists only when a method runs",
            )
        return self.content

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the numpy array of a value."""
        return self.torch().numpy()

    def _kind(self) -> str:
        for kind, name in ((Var, "traced"), (Formula, "derived"), (torch.Tensor, "value")):
            if isinstance(self.content, kind):
                return name
        return "placeholder"

    def __repr__(self) -> str:
        return f"<Tensor {type_text(self.type)} {self._kind()}>"

    # TVM's methods.
    def astype(self, dtype: str) -> Tensor:
        """Cast to `dtype`; the tensor itself if that is its dtype."""
        dtype = dtype_name(dtype)
        return self if dtype == self.dtype else apply(ops.astype, (self,), {"dtype": dtype})

    def to(self, dtype: str) -> Tensor:
        """Cast to `dtype`."""
        return self.astype(dtype)

    def reshape(self, *shape: Any) -> Tensor:
        """Give it another shape with as many elements; one -1 is filled in."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return _apply(ops.reshape, self, shape=tuple(sizes))

    def permute_dims(self, *axes: Any) -> Tensor:
        """Reorder the axes; without arguments reverse them."""
        order = (
            axes[0] if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], (tuple, list))) else axes
        )
        return _apply(ops.permute_dims, self, axes=tuple(order) if order else None)

    def repeat(self, repeats: int, axis: int | None = None) -> Tensor:
        """Repeat elements along an axis."""
        return _apply(ops.repeat, self, repeats=repeats, axis=axis)

    def maximum(self, other: Any) -> Tensor:
        """Elementwise maximum."""
        return _apply(ops.maximum, self, other)

    def minimum(self, other: Any) -> Tensor:
        """Elementwise minimum."""
        return _apply(ops.minimum, self, other)

    def __getitem__(self, index: Any) -> Tensor:
        return _apply(ops.getitem, self, index=index if isinstance(index, tuple) else (index,))

    def __len__(self) -> int:
        size = self.shape[0] if self.shape else None
        if not isinstance(size, int):
            raise self._unknown("length", "use x.shape[0]")
        return size

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        if isinstance(self.content, torch.Tensor):
            return bool(self.content)
        raise self._unknown(
            "truth", "use op.cond(pred, then, otherwise), op.where, or compare with None using `is`"
        )

    def _number(self) -> Any:
        if isinstance(self.content, torch.Tensor):
            return self.content.item()
        raise self._unknown("value", "compute with ops, or pass the number as a spec.Int argument")

    def _unknown(self, what: str, help: str) -> TraceError:
        text = f"the {what} of {self!r} is not known when the method is traced"
        return TraceError(text, where=outside_place(), help=help)

    def __float__(self) -> float:
        return float(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __index__(self) -> int:
        return int(self._number())

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TraceError(
            f"{self!r} does not change in place",
            where=outside_place(),
            help="make another: op.where(mask, new, x), op.scatter(x, indices, updates, axis), or op.concat",
        )

    def __delitem__(self, index: Any) -> NoReturn:
        self[index] = None

    if not TYPE_CHECKING:  # which knows what attributes there are

        def __getattr__(self, name: str) -> NoReturn:
            own = [n for n in dir(type(self)) if n[0] != "_"]
            raise UnknownName(
                f"a tensor has no attribute {name!r}", where=outside_place(), help=elsewhere.how(name, own)
            )

    __hash__ = object.__hash__

    # What torch and numpy ask when they meet a tensor.
    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function not in foreign.OPERATORS or kwargs:
            raise foreign.refused(function)
        return apply(foreign.OPERATORS[function], args, {})

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if function not in foreign.OPERATORS or kwargs or method != "__call__":
            raise foreign.refused(function)
        return apply(foreign.OPERATORS[function], args, {})

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> NoReturn:
        raise foreign.refused(function)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype)


def _define_operators() -> None:
    """Give Tensor its operators: one table instead of thirty methods that differ in a name."""

    def forward(op: Op) -> Callable[[Tensor, Any], Any]:
        return lambda self, other: apply(op, (self, other), {}) if is_operand(other) else NotImplemented

    def reflected(op: Op) -> Callable[[Tensor, Any], Any]:
        return lambda self, other: apply(op, (other, self), {}) if is_operand(other) else NotImplemented

    def single(op: Op) -> Callable[[Tensor], Any]:
        return lambda self: apply(op, (self,), {})

    for name, op in foreign.BINARY.items():
        setattr(Tensor, f"__{name}__", forward(op))
        setattr(Tensor, f"__r{name}__", reflected(op))
    for name, op in foreign.COMPARE.items():
        setattr(Tensor, f"__{name}__", forward(op))
    for name, op in foreign.UNARY.items():
        setattr(Tensor, f"__{name}__", single(op))


def is_operand(x: Any) -> bool:
    """Whether `x` may stand where an op wants a tensor or a number."""
    return isinstance(x, (Tensor, bool, int, float, Dim, torch.Tensor, np.ndarray, np.generic))


def value(data: torch.Tensor) -> Tensor:
    """Wrap a torch tensor."""
    return Tensor(TensorType(tuple(data.shape), dtype_name(data.dtype)), data)


def _apply(op: Op, *args: Any, **attrs: Any) -> Any:
    """Apply with the defaults of attributes filled in."""
    return apply(op, args, {name: attrs.get(name, default) for name, default in op.attributes.items()})


def apply(op: Op, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Any:
    """Apply `op` in the active mode: emit a binding, run it, or note a formula."""
    mode = active_mode.get()
    if mode is not None:
        return mode.apply(op, args, attrs)
    operands = tuple(as_operand(a, op) for a in args)
    for a in operands:
        if isinstance(a, Tensor) and isinstance(a.content, Var):
            raise out_of_trace(a)
    if any(isinstance(a, Tensor) and not isinstance(a.content, torch.Tensor) for a in operands):
        call = FormulaCall(op, operands, canonical(op, operand_types(operands), attrs), user_place())
        result = call.result_type()
        if isinstance(result, TupleType):
            return tuple(Tensor(None, Formula(call, i)) for i in range(len(result.fields)))
        return Tensor(None, Formula(call))
    types = operand_types(operands)
    type = infer(op, types, attrs := canonical(op, types, attrs), "")
    if any(isinstance(size, Dim) for size in (*sizes_of(type), *attrs.values())):
        raise TraceError(
            f"{op.name}: a dim has no value outside a method",
            details=[f"the result would be {type_text(type)}"],
            where=user_place(),
            help="make it inside the method, or of parameters with that dim",
        )
    values = [a.content if isinstance(a, Tensor) else a for a in operands]
    result = run_reference(op, values, attrs, type, {})
    return tuple(map(value, result)) if isinstance(result, (tuple, list)) else value(result)


def as_operand(x: Any, op: Op) -> Any:
    """Turn what an author may pass into a Tensor, a number, a Dim, or None."""
    if x is None or isinstance(x, (Tensor, bool, int, float, Dim)):
        return x
    if isinstance(x, torch.Tensor):
        return value(x)
    if isinstance(x, np.ndarray):
        return value(torch.from_numpy(x))
    if isinstance(x, np.generic):
        return x.item()
    listed = isinstance(x, (list, tuple))
    raise InferError(
        f"{op.name}: {x!r} is not a tensor or a number",
        where=outside_place(),
        help="nnfront.Tensor.from_const makes a constant of numbers, op.stack a tensor of tensors"
        if listed
        else "call it first"
        if callable(x)
        else "",
    )


def operand_type(x: Any) -> Type | None:
    """Return the IR type of an operand as `as_operand` gives it."""
    if isinstance(x, Tensor):
        return x.type
    if x is None:
        return None
    if isinstance(x, bool):
        return ScalarType("bool")
    if isinstance(x, float):
        return ScalarType("float64")
    if isinstance(x, (int, Dim)):
        return ScalarType("int64", x)
    return x.type


def operand_types(args: Sequence[Any]) -> list[Type | None]:
    """Return the types of an op's operands."""
    return [operand_type(a) for a in args]


_define_operators()
