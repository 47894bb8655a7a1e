# SPDX-License-Identifier: Apache-2.0
"""Expressions in A-normal form: the operands of every expression are atoms (variables, constants, literals).

A variable is its own identity; its name is unique inside its function. Everything here is immutable; sharing is free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from nnfront.dims import Dim
from nnfront.ir.op import Op
from nnfront.ir.types import ScalarType, TensorType, Type

NO_ATTRS: Mapping[str, Any] = MappingProxyType({})

Role: TypeAlias = Literal["input", "weight", "transformed", "state"]
ROLES: tuple[Role, ...] = ("input", "weight", "transformed", "state")


class Var:
    """A value with a name and a type, bound once. Compared by identity."""

    __slots__ = ("name", "type")

    def __init__(self, name: str, type: Type) -> None:
        self.name = name
        self.type = type

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.type}>"


class Param(Var):
    """A function's parameter: a variable with a role.

    input: given on each call. weight: a checkpoint parameter under its checkpoint name. transformed: a result of the weight
    transform. state: a handle (cache) that the function writes and gives back.
    """

    __slots__ = ("role",)

    def __init__(self, name: str, type: Type, role: Role) -> None:
        super().__init__(name, type)
        self.role = role


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A tensor known when the module was written: its type and its elements, row-major, little-endian."""

    type: TensorType
    data: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """A host scalar literal, or a dim used as a number."""

    value: bool | int | float | Dim

    @property
    def type(self) -> ScalarType:
        """Its type; an integer knows its value."""
        if isinstance(self.value, bool):
            return ScalarType("bool")
        if isinstance(self.value, float):
            return ScalarType("float64")
        return ScalarType("int64", self.value)


Atom: TypeAlias = Var | Constant | Scalar


def tensor_type(operand: Atom | None) -> TensorType:
    """Return the type of an operand that is a tensor."""
    assert operand is not None and isinstance(operand.type, TensorType)
    return operand.type


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An op applied to operands; None stands for an optional operand that is absent."""

    op: Op
    args: tuple[Atom | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRS)


def canonical_call(op: Op, args: Sequence[Atom | None], attrs: Mapping[str, Any] = NO_ATTRS) -> Call:
    """Return a call with its attributes as the op stores them, which may depend on its operands; an attribute left out has its default.

    Raises InferError for what the op cannot take.
    """
    types = [None if a is None else a.type for a in args]
    return Call(op, tuple(args), op.canonical_attrs(types, op.full_attrs(attrs)))


@dataclass(frozen=True, slots=True, eq=False)
class FunctionCall:
    """A call of another function of the module, by name."""

    function: str
    args: tuple[Atom, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Tuple:
    """Several values as one; `names` if they are fields of a dict."""

    fields: tuple[Atom, ...]
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """One field of a tuple."""

    tuple: Atom
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class If:
    """The value of one of two blocks, by a boolean scalar or a boolean tensor without axes."""

    condition: Atom
    then: Block
    otherwise: Block

    def with_(self, condition: Atom, then: Block, otherwise: Block) -> If:
        """Return one of these; the same object if they are its own."""
        is_same = condition is self.condition and then is self.then and otherwise is self.otherwise
        return self if is_same else If(condition, then, otherwise)


@dataclass(frozen=True, slots=True, eq=False)
class MatchShape:
    """The same value under a type that may define new dims; checked when it runs."""

    value: Atom
    type: Type


Expr: TypeAlias = Var | Constant | Scalar | Call | FunctionCall | Tuple | Projection | If | MatchShape


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a binding comes from: module path (relative to the caller in a shared body), file and line of the author's code."""

    module: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else ""
        return f"{self.module} ({place})" if self.module and place else self.module or place

    def inside(self, module: str) -> Provenance:
        """Return the place of something that is called in a module of this path."""
        return Provenance(".".join(part for part in (module, self.module) if part), self.file, self.line)


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """A variable and the expression that gives its value."""

    var: Var
    value: Expr
    provenance: Provenance | None = None

    def with_value(self, value: Expr) -> Binding:
        """Return what binds another value to the variable; the same object for its own value."""
        return self if value is self.value else Binding(self.var, value, self.provenance)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Bindings in order, and the atom that is their result."""

    bindings: tuple[Binding, ...]
    result: Atom
