# SPDX-License-Identifier: Apache-2.0
"""Structural equality: where two functions or modules first differ.

Names of local variables do not matter, those of functions, parameters and dims do; parameters are matched by position.
Provenance does not matter, nor does the order of attributes. Dims are compared as they are written, and by their facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from nnfront.ir.expr import (
    Atom,
    Binding,
    Block,
    Call,
    Constant,
    Expr,
    FunctionCall,
    If,
    MatchShape,
    Projection,
    Scalar,
    Tuple,
    Var,
)
from nnfront.ir.function_dims import symbols_in
from nnfront.ir.interfaces import FunctionData, ModuleLike
from nnfront.ir.print_types import TypePrinter, dim_text
from nnfront.ir.types import Type


def first_difference(a: FunctionData | ModuleLike, b: FunctionData | ModuleLike) -> str | None:
    """Return where two functions or two modules differ and how, None if they are equal.

    As a path: `prefill.bindings[3] (take_1).attrs['axis']: 0 != 1`.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return _modules(cast(ModuleLike, a), cast(ModuleLike, b))
    return None if a is b else _functions(cast(FunctionData, a), cast(FunctionData, b))


def _functions(a: FunctionData, b: FunctionData) -> str | None:
    difference = _Comparison(a, b).functions(a, b)
    return None if difference is None else a.name + difference


def _modules(a: ModuleLike, b: ModuleLike) -> str | None:
    if list(a) != list(b):
        return f"functions: {', '.join(a)} != {', '.join(b)}"
    texts = TypePrinter(())
    return _mappings(".attrs", a.attrs, b.attrs, texts, texts) or _first(
        first_difference(a[name], b[name]) for name in a
    )


class _Comparison:
    """One comparison of two functions. Every method returns the first difference as the rest of a path, None for none."""

    def __init__(self, a: FunctionData, b: FunctionData) -> None:
        self.dims_a, self.dims_b = symbols_in(a), symbols_in(b)
        self.a, self.b = TypePrinter(self.dims_a), TypePrinter(self.dims_b)
        self.partners: dict[Var, Var] = {}  # what b has in the place of a variable of a

    def functions(self, a: FunctionData, b: FunctionData) -> str | None:
        for what, x, y in (("name", a.name, b.name), ("kind", a.kind, b.kind)):
            if x != y:
                return f".{what}: {x!r} != {y!r}"
        if len(a.params) != len(b.params):
            return f".params: {len(a.params)} != {len(b.params)}"
        for i, (p, q) in enumerate(zip(a.params, b.params, strict=True)):
            here = f".params[{i}]"
            if (p.name, p.role) != (q.name, q.role):
                return f"{here}: {p.role} {p.name!r} != {q.role} {q.name!r}"
            if difference := self.types(f"{here} ({p.name}).type", p.type, q.type):
                return difference
            self.partners[p] = q
        return (
            self.blocks("", a.body, b.body)
            or _mappings(".attrs", a.attrs, b.attrs, self.a, self.b)
            or _values(".dims", self._header(self.a, self.dims_a), self._header(self.b, self.dims_b))
        )

    @staticmethod
    def _header(texts: TypePrinter, symbols: Sequence[Any]) -> str:
        return ", ".join(dim_text(symbol, texts.dims.names[symbol]) for symbol in symbols)

    def blocks(self, path: str, a: Block, b: Block) -> str | None:
        for i, (x, y) in enumerate(zip(a.bindings, b.bindings, strict=False)):
            if difference := self.bindings(x, y):
                return f"{path}.bindings[{i}] ({x.var.name}){difference}"
        if len(a.bindings) != len(b.bindings):
            return f"{path}.bindings: {len(a.bindings)} != {len(b.bindings)}"
        return self.atoms(f"{path}.result", a.result, b.result)

    def bindings(self, a: Binding, b: Binding) -> str | None:
        difference = self.exprs(a.value, b.value) or self.types(".type", a.var.type, b.var.type)
        self.partners[a.var] = b.var
        return difference

    def exprs(self, a: Expr, b: Expr) -> str | None:
        match a, b:
            case Call(), Call():
                return (
                    _values(".op", a.op.name, b.op.name)
                    or self.lists(".args", a.args, b.args)
                    or (_mappings(".attrs", a.attrs, b.attrs, self.a, self.b) if a.attrs or b.attrs else None)
                )
            case FunctionCall(), FunctionCall():
                return _values(".function", a.function, b.function) or self.lists(".args", a.args, b.args)
            case Tuple(), Tuple():
                return _values(".names", a.names, b.names) or self.lists(".fields", a.fields, b.fields)
            case Projection(), Projection():
                return self.atoms(".tuple", a.tuple, b.tuple) or _values(".index", a.index, b.index)
            case If(), If():
                return (
                    self.atoms(".condition", a.condition, b.condition)
                    or self.blocks(".then", a.then, b.then)
                    or self.blocks(".otherwise", a.otherwise, b.otherwise)
                )
            case MatchShape(), MatchShape():
                return self.atoms(".value", a.value, b.value) or self.types(".type", a.type, b.type)
            case ((Var() | Constant() | Scalar()), (Var() | Constant() | Scalar())):
                return self.atoms("", a, b)
            case _:
                return f": {type(a).__name__} != {type(b).__name__}"

    def lists(self, path: str, a: Sequence[Atom | None], b: Sequence[Atom | None]) -> str | None:
        if len(a) != len(b):
            return f"{path}: {len(a)} != {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if difference := self.atoms("", x, y):
                return f"{path}[{i}]{difference}"
        return None

    def atoms(self, path: str, a: Atom | None, b: Atom | None) -> str | None:
        match a, b:
            case None, None:
                return None
            case Var(), Var() if self.partners.get(a) is b:
                return None
            case Scalar(), Scalar():
                x, y = self.a.item(a.value), self.b.item(b.value)
                return None if x == y else f"{path}: {x} != {y}"
            case Constant(), Constant():
                difference = self.types(f"{path}.type", a.type, b.type)
                return difference or (None if a.data == b.data else f"{path}.data: {_bytes(a.data, b.data)}")
            case _:
                return f"{path}: {_atom(a)} != {_atom(b)}"

    def types(self, path: str, a: Type, b: Type) -> str | None:
        x, y = self.a.type(a), self.b.type(b)
        return None if x == y else f"{path}: {x} != {y}"


def _mappings(
    path: str, a: Mapping[str, Any], b: Mapping[str, Any], texts_a: TypePrinter, texts_b: TypePrinter
) -> str | None:
    for name in (*a, *(name for name in b if name not in a)):
        x = texts_a.item(a[name]) if name in a else "nothing"
        y = texts_b.item(b[name]) if name in b else "nothing"
        if x != y:
            return f"{path}[{name!r}]: {x} != {y}"
    return None


def _values(path: str, a: object, b: object) -> str | None:
    return None if a == b else f"{path}: {a} != {b}"


def _atom(atom: Atom | None) -> str:
    match atom:
        case None:
            return "nothing"
        case Var():
            return atom.name
        case Constant():
            return "a constant"
        case Scalar():
            return str(atom.value)


def _bytes(a: bytes, b: bytes) -> str:
    if len(a) != len(b):
        return f"{len(a)} bytes != {len(b)} bytes"
    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return f"byte {at}: {a[at]} != {b[at]}"


def _first(differences: Iterable[str | None]) -> str | None:
    return next((difference for difference in differences if difference), None)
