# SPDX-License-Identifier: Apache-2.0
"""`FunctionBuilder`: make a function binding by binding, with unique names and inferred types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nnfront.ir.expr import (
    NO_ATTRS,
    Atom,
    Binding,
    Call,
    Expr,
    FunctionCall,
    Param,
    Projection,
    Provenance,
    Role,
    Tuple,
    Var,
    canonical_call,
)
from nnfront.ir.infer import infer
from nnfront.ir.interfaces import Kind
from nnfront.ir.module import Function
from nnfront.ir.op import Op
from nnfront.ir.types import Type
from nnfront.ir.walk import walk_bindings


class Names:
    """Names taken in one function; `unique` gives the next free one: `add`, `add_1`, `add_2`."""

    __slots__ = ("_next",)

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._next: dict[str, int] = dict.fromkeys(taken, 1)

    @staticmethod
    def of(function: Function) -> Names:
        """Return those of a function's parameters and variables."""
        variables = (*function.params, *(binding.var for binding in walk_bindings(function.bindings)))
        return Names(var.name for var in variables)

    def unique(self, hint: str) -> str:
        """Return `hint`, or the first free `hint_N`, and take it."""
        taken = self._next
        count = taken.get(hint)
        if count is None:
            taken[hint] = 1
            return hint
        while (name := f"{hint}_{count}") in taken:
            count += 1
        taken[hint] = count + 1
        taken[name] = 1
        return name


class FunctionBuilder:
    """Collects parameters and bindings of one function. `functions` are those it may call."""

    def __init__(self, name: str, functions: Mapping[str, Function] | None = None) -> None:
        self.name = name
        self.functions: Mapping[str, Function] = functions if functions is not None else {}
        self.params: list[Param] = []
        self.names = Names()
        self.place: Provenance | None = (
            None  # of bindings for which no other is given: that of the last one that had one
        )
        self._blocks: list[list[Binding]] = [[]]
        self._scope: dict[str, Var] = {}  # what may be used at this point, by name

    @staticmethod
    def of_bindings(names: Names, place: Provenance | None) -> FunctionBuilder:
        """Return a builder of bindings for a function that has these names already, where one of this provenance was."""
        builder = FunctionBuilder("")
        builder.names, builder.place = names, place
        return builder

    def param(self, name: str, type: Type, role: Role) -> Param:
        """Add a parameter."""
        param = Param(self.names.unique(name), type, role)
        self.params.append(param)
        self._scope[param.name] = param
        return param

    def emit(
        self, value: Expr, hint: str = "", provenance: Provenance | None = None, type: Type | None = None
    ) -> Var:
        """Bind `value` to a new variable; its type is inferred unless the caller has inferred it."""
        if type is None:
            type = infer(value, self.functions)
        if provenance is None:
            provenance = self.place
        else:
            self.place = provenance
        var = Var(self.names.unique(hint or _hint(value)), type)
        self._blocks[-1].append(Binding(var, value, provenance))
        self._scope[var.name] = var
        return var

    def sees(self, var: Var) -> bool:
        """Whether `var` is of this function and of no branch that has ended."""
        return self._scope.get(var.name) is var

    def call(self, op: Op, *args: Atom | None, **attrs: Any) -> Var:
        """Bind a call of `op`."""
        return self.emit(canonical_call(op, args, attrs))

    def append(self, binding: Binding) -> None:
        """Add a finished binding whose variable's name is not taken."""
        self.names.unique(binding.var.name)
        self._blocks[-1].append(binding)
        self._scope[binding.var.name] = binding.var

    @contextmanager
    def block(self) -> Iterator[list[Binding]]:
        """Collect the bindings made inside into a list of their own, for a branch of an `if`."""
        self._blocks.append([])
        try:
            yield self._blocks[-1]
        finally:
            for binding in self._blocks.pop():
                del self._scope[binding.var.name]

    @contextmanager
    def outermost(self) -> Iterator[None]:
        """Emit into the function's own block, ahead of the `if` whose branch is being collected."""
        blocks, self._blocks = self._blocks, self._blocks[:1]
        try:
            yield
        finally:
            self._blocks = blocks

    def finish(self, result: Atom, kind: Kind = "public", attrs: Mapping[str, Any] = NO_ATTRS) -> Function:
        """Return the function."""
        assert len(self._blocks) == 1
        return Function(self.name, tuple(self.params), tuple(self._blocks[0]), result, kind, attrs)


def _hint(value: Expr) -> str:
    match value:
        case Call():
            return value.op.name.rstrip("_")
        case FunctionCall():
            return value.function
        case Projection():
            return value.tuple.name if isinstance(value.tuple, Var) else "field"
        case Tuple():
            return "tuple"
        case _:
            return "value"
