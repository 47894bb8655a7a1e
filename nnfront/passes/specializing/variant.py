# SPDX-License-Identifier: Apache-2.0
"""A method as one of its special cases needs it: what the case knows is put in, the rest is as before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nnfront import ops
from nnfront.cases.attributes import DECLARED, LISTED
from nnfront.cases.conditions import Case, Causal, Value, Zeros
from nnfront.dims import Size, Symbol, as_symbol, of_symbol
from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Function,
    Names,
    Op,
    Param,
    Scalar,
    ScalarType,
    TensorType,
    Type,
    Var,
    canonical_call,
    substitute_type,
    undefined_symbols,
)
from nnfront.passes.bind_dims import bind_symbols


def private(method: Function, name: str) -> Function:
    """Return a private function that does what a method does."""
    attrs = {key: value for key, value in method.attrs.items() if key not in ("transform", LISTED, DECLARED)}
    return method.with_(name=name, kind="private", attrs=attrs)


def specialised(method: Function, case: Case, name: str, functions: Mapping[str, Function]) -> Function:
    """Return the private function that does what a method does in a case, without the arguments that the case knows."""
    sizes = _sizes(case)
    general = private(method, name)
    names, first = Names.of(general), list[Binding]()

    def known(name: str, type: Type, value: Value) -> Atom:
        """What stands for an argument whose value is known; a tensor is made ahead of the body."""
        if isinstance(type, ScalarType):
            assert isinstance(value, bool | int | float)
            return Scalar(value)

        def emit(call: Call, its: Type) -> Var:
            is_last = its == type and all(b.var.name != name for b in first)
            first.append(Binding(Var(name if is_last else names.unique(name), its), call))
            return first[-1].var

        return known_value(type, value, emit)

    atoms = {v.name: known(v.name, substitute_type(v.type, sizes), v.values[0]) for v in case.values}
    variant = bind_symbols(general, sizes, functions, atoms)
    variant = variant.with_(bindings=(*first, *variant.bindings))
    # A tensor whose elements are known may be the only one that says what a dim is: then the dim is handed over.
    dims = (
        Param(names.unique(symbol.name), ScalarType("int64", of_symbol(symbol)), "input")
        for symbol in undefined_symbols(variant) or ()
    )
    return variant.with_(params=(*variant.params, *dims))


def _sizes(case: Case) -> dict[Symbol, Size]:
    """What the dims are in a case: numbers, or themselves with narrower facts."""
    sizes: dict[Symbol, Size] = {
        d.symbol: of_symbol(d.symbol) if d.symbol.only is None else d.symbol.only for d in case.dims
    }
    for given in case.values:
        size = given.type.value if isinstance(given.type, ScalarType) else None
        symbol = None if size is None else as_symbol(size)
        if symbol is not None and isinstance(given.values[0], int):
            sizes[symbol] = given.values[0]
    return sizes


def known_value(type: Type, value: Value, emit: Callable[[Call, Type], Var]) -> Var:
    """Write the expression of a tensor whose value a case knows; `emit` binds a call to a new variable."""
    assert isinstance(type, TensorType)

    def call(op: Op, *args: Atom, **attrs: Any) -> Var:
        made = canonical_call(op, args, attrs)
        return emit(made, op.result_type([a.type for a in args], made.attrs))

    shape, dtype = type.shape, type.dtype
    if isinstance(value, Zeros):
        return call(ops.zeros, shape=shape, dtype=dtype)
    if not isinstance(value, Causal):
        return call(ops.full, Scalar(value), shape=shape, dtype=dtype)
    if dtype == "bool":
        return call(ops.tril, call(ops.ones, shape=shape, dtype=dtype))
    return call(ops.triu, call(ops.full, Scalar(value.hidden), shape=shape, dtype=dtype), diagonal=1)
