# SPDX-License-Identifier: Apache-2.0
"""The values that weights alone determine, each once, whatever function computes it.

Two expressions with one op, operands and attributes are one value: in this way functions that share a transform find each
other's work. A graph belongs to the functions that share a transform, or to one private function, whose parameters are leaves.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nnfront import dtypes
from nnfront.dims import Size, product
from nnfront.ir import (
    Atom,
    Call,
    Expr,
    Projection,
    Provenance,
    Scalar,
    TensorType,
    Tuple,
    Type,
    map_expr,
    no_block,
    reachable,
)
from nnfront.ir.value_numbering import atom_key, expr_key
from nnfront.passes.sizes import SizeMap, map_scalar, resize_expr


@dataclass(slots=True, eq=False)
class Value:
    """One value. `expr` is None for a leaf: a weight, or a parameter of a private function.

    `operands` stand in the place of the expression's atoms, values where it reads variables. `uses_weight`: a weight is among
    what it depends on. `is_fixed`: it moves whatever it costs, since it was declared, or moved before.
    """

    index: int
    expr: Expr | None
    operands: tuple[Operand, ...]
    type: Type
    name: str
    provenance: Provenance | None
    uses_weight: bool
    is_fixed: bool = False
    declared_in: str | None = None  # the module path, if it is a derived tensor of a module
    is_named: bool = True  # by the author; otherwise the name is made from the operand's

    @property
    def inputs(self) -> list[Value]:
        """The values that it is computed from."""
        return [operand for operand in self.operands if isinstance(operand, Value)]

    @property
    def sources(self) -> list[Value]:
        """Those of them that depend on a weight."""
        return [value for value in self.inputs if value.uses_weight]

    @property
    def is_base(self) -> bool:
        """Whether it is kept, if it is needed, without asking what it costs."""
        return self.expr is None or self.is_fixed

    @property
    def can_stay(self) -> bool:
        """Whether it can be a result of the transform: leaves of any type, else tensors."""
        return self.expr is None or isinstance(self.type, TensorType)

    @property
    def size_bytes(self) -> Size:
        """Bytes that it takes when it is kept."""
        if not isinstance(self.type, TensorType):
            return 0
        return product(self.type.shape) * dtypes.size_bytes(self.type.dtype)

    @property
    def viewed(self) -> Value | None:
        """The value that this is only a view of, None if it has memory of its own."""
        value: Value = self
        while isinstance(value.expr, Projection) or (isinstance(value.expr, Call) and value.expr.op.is_view):
            (value,) = value.inputs
        return None if value is self else value


Operand: TypeAlias = Value | Atom | None


class Values:
    """A graph of values in the order in which they can be computed."""

    def __init__(self) -> None:
        self.items: list[Value] = []
        self._known: dict[Hashable, Value] = {}

    def leaf(self, name: str, type: Type) -> Value:
        """Add a weight."""
        value = Value(len(self.items), None, (), type, name, None, True)
        self.items.append(value)
        return value

    def make(
        self,
        expr: Expr,
        operands: Sequence[Operand],
        type: Type,
        name: str = "",
        provenance: Provenance | None = None,
    ) -> Value:
        """Return the value of `expr` over `operands`, which exists already or is added; without a name it is named after its operand."""
        if isinstance(expr, Projection):
            source = operands[0]
            if isinstance(source, Value) and isinstance(source.expr, Tuple):
                field = source.operands[expr.index]
                return field if isinstance(field, Value) else self.make(field, (field,), type)  # type: ignore[arg-type]
        key = expr_key(expr, [o if isinstance(o, Value) else atom_key(o) for o in operands])
        value = self._known.get(key)
        if value is None:
            uses = any(isinstance(o, Value) and o.uses_weight for o in operands)
            is_named = bool(name)
            name = name or _name_after(expr, operands)
            value = Value(
                len(self.items), expr, tuple(operands), type, name, provenance, uses, is_named=is_named
            )
            self.items.append(value)
            self._known[key] = value
        return value


def computed_from(values: Iterable[Value], known: Container[Value] = ()) -> list[Value]:
    """Return the values and all that they are computed from, but for what is known, in the order of the graph."""
    found = reachable(values, lambda v: () if v in known else v.inputs)
    return sorted((v for v in found if v not in known), key=lambda v: v.index)


def _name_after(expr: Expr, operands: Sequence[Operand]) -> str:
    """A name for what the author gave none: `mlp.gate_up.permute_dims`, `qkv.split.0`."""
    op = expr.op.name if isinstance(expr, Call) else str(expr.index) if isinstance(expr, Projection) else ""
    source = next((o.name for o in operands if isinstance(o, Value) and o.uses_weight), "")
    return ".".join(part for part in (source, op) if part) or "value"


def resized(expr: Expr, size: SizeMap) -> Expr:
    """Return a value's expression with its sizes replaced; its operands are kept apart from it."""
    return map_scalar(expr, size) if isinstance(expr, Scalar) else resize_expr(expr, size)


def with_operands(expr: Expr, atoms: Sequence[Atom | None]) -> Expr:
    """Return an expression over other atoms."""
    given = iter([atom for atom in atoms if atom is not None])
    return map_expr(expr, lambda _: next(given), no_block)
