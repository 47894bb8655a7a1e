# SPDX-License-Identifier: Apache-2.0
"""A function of the IR as a Python function: what the reference of an op calls that is given one.

Its ops run through their references, one after the other, on whatever device the tensors are.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from nnfront.dims import Dim, Size, Symbol, evaluate, solve, substitute
from nnfront.errors import DimError, RunError
from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Constant,
    Expr,
    Function,
    FunctionCall,
    FunctionName,
    If,
    MatchShape,
    Projection,
    Scalar,
    ScalarType,
    TensorType,
    Tuple,
    TupleType,
    Type,
    Var,
    dims_in,
    walk_exprs,
)
from nnfront.ops.constants import value_of


class FunctionValue:
    """A function and those that it calls, ready to be called with tensors and numbers. Two that print alike compute alike."""

    def __init__(self, function: Function, functions: Mapping[str, Function]) -> None:
        self.function = function
        self._functions = functions
        self._callees: dict[str, FunctionValue] = {}
        self._bound: dict[int, Callable[..., Any]] = {}  # calls whose attributes hold no dims, by id
        self._constants: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._solved: tuple[list[int], dict[Symbol, int]] | None = (
            None  # sizes of the last call, and its dims
        )

    def __call__(self, *args: Any) -> Any:
        """Call it with one argument for each parameter."""
        params = self.function.params
        sizes: list[Size] = []
        numbers: list[int] = []
        for param, arg in zip(params, args, strict=True):
            _observe(param.type, arg, sizes, numbers)
        if self._solved is None or self._solved[0] != numbers:
            self._solved = numbers, solve(list(zip(sizes, numbers, strict=True)))
        run = _Run(self, dict(self._solved[1]), dict(zip(params, args, strict=True)))
        return run.block(self.function.bindings, self.function.result)

    @property
    def is_pure(self) -> bool:
        """Whether a call has no effect."""
        calls = (e for e in walk_exprs(self.function) if isinstance(e, Call))
        return all(call.op.is_pure_for(call.args) for call in calls) and all(
            self.callee(name).is_pure for name in self.function.callees
        )

    def asks_host(self, ops: Container[str]) -> bool:
        """Whether a call takes a branch, or runs one of these ops, which read results back to the host."""
        exprs = list(walk_exprs(self.function))
        return any(isinstance(e, If) or (isinstance(e, Call) and e.op.name in ops) for e in exprs) or any(
            self.callee(name).asks_host(ops) for name in self.function.callees
        )

    def callee(self, name: str) -> FunctionValue:
        """Return a function that it calls."""
        if name not in self._callees:
            self._callees[name] = FunctionValue(self._functions[name], self._functions)
        return self._callees[name]

    def bound(self, call: Call, dims: Mapping[Symbol, int]) -> Callable[..., Any]:
        """Return the reference of a call's op as a function of the operands."""
        found = self._bound.get(id(call))
        if found is not None:
            return found
        has_dims = any(next(dims_in(value), None) is not None for value in call.attrs.values())
        attrs = {name: self._attr(value, dims) for name, value in call.attrs.items()}
        made = call.op.bound(attrs)
        if not has_dims:
            self._bound[id(call)] = made
        return made

    def _attr(self, value: Any, dims: Mapping[Symbol, int]) -> Any:
        if isinstance(value, FunctionName):
            return self.callee(value.name)
        if isinstance(value, tuple | list):
            return tuple(self._attr(item, dims) for item in value)
        return evaluate(value, dims) if isinstance(value, Dim) else value

    def constant(self, atom: Constant) -> torch.Tensor:
        """Return a constant as a tensor on the device that tensors are made on now; it is moved there once."""
        key = id(atom), torch.get_default_device()
        if key not in self._constants:
            value = value_of(atom)
            assert isinstance(value, torch.Tensor)
            self._constants[key] = value.to(key[1])
        return self._constants[key]

    def __str__(self) -> str:
        return f"@{self.function.name}"

    def __repr__(self) -> str:
        return "\n".join([str(self.function), *(repr(self.callee(name)) for name in self.function.callees)])


class _Run:
    """One call: the dims and the values of variables."""

    def __init__(self, owner: FunctionValue, dims: dict[Symbol, int], values: dict[Any, Any]) -> None:
        self.owner, self.dims, self.values = owner, dims, values

    def block(self, bindings: Sequence[Binding], result: Atom) -> Any:
        for binding in bindings:
            self.values[binding.var] = self.expr(binding.value)
        return self.atom(result)

    def expr(self, expr: Expr) -> Any:
        match expr:
            case Call():
                args = [None if a is None else self.atom(a) for a in expr.args]
                return self.owner.bound(expr, self.dims)(*args)
            case FunctionCall():
                return self.owner.callee(expr.function)(*map(self.atom, expr.args))
            case Tuple():
                return tuple(map(self.atom, expr.fields))
            case Projection():
                return self.atom(expr.tuple)[expr.index]
            case If():
                block = expr.then if bool(self.atom(expr.condition)) else expr.otherwise
                return self.block(block.bindings, block.result)
            case MatchShape():
                return self.matched(self.atom(expr.value), expr.type)
            case _:
                return self.atom(expr)

    def atom(self, atom: Atom) -> Any:
        match atom:
            case Var():
                return self.values[atom]
            case Constant():
                return self.owner.constant(atom)
            case Scalar():
                return evaluate(atom.value, self.dims) if isinstance(atom.value, Dim) else atom.value

    def matched(self, value: Any, type: Type) -> Any:
        """Check a value against a type and note the dims that it defines."""
        sizes: list[Size] = []
        numbers: list[int] = []
        _observe(type, value, sizes, numbers)
        try:
            self.dims |= solve([(substitute(s, self.dims), n) for s, n in zip(sizes, numbers, strict=True)])
        except DimError as error:
            raise RunError(f"match_shape: {error.what}", details=error.details) from None
        return value


def _observe(type: Type, value: Any, sizes: list[Size], numbers: list[int]) -> None:
    """Add the sizes in a type, and what a value has in their places."""
    match type:
        case TensorType():
            sizes += type.shape
            numbers += value.shape
        case ScalarType() if type.value is not None:
            sizes.append(type.value)
            numbers.append(value)
        case TupleType():
            for field, item in zip(type.fields, value, strict=True):
                _observe(field, item, sizes, numbers)
        case _:
            pass
