# SPDX-License-Identifier: Apache-2.0
"""What remains of methods and private functions when some values come from the transform.

A private function gets one version for each set of values that its callers hand it: call sites that agree share one, others
get a clone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from nnfront.dims import Size, Symbol, of_symbol
from nnfront.ir import (
    Atom,
    Binding,
    Block,
    Expr,
    Function,
    FunctionCall,
    Names,
    Param,
    Role,
    Scalar,
    ScalarType,
    Var,
    are_same,
    map_expr,
    undefined_symbols,
    walk_bindings,
)
from nnfront.passes.effects import is_alive
from nnfront.passes.lifting.analyse import Analyzer, size_map
from nnfront.passes.lifting.dims import definable
from nnfront.passes.lifting.scope import Scope, Site, is_number
from nnfront.passes.lifting.value_graph import Value
from nnfront.passes.sizes import Resizer

StandIn: TypeAlias = Callable[[Value], Var]


@dataclass(frozen=True, eq=False)
class Version:
    """A private function as some callers call it: which of its parameters are left, then the values and dims handed in."""

    function: Function
    formals: tuple[int, ...]
    moved: tuple[Value, ...]
    dims: tuple[Symbol, ...]


class Splitter:
    """Rewrites functions; versions are shared by everything that one splitter rewrites. `pinned` functions stay as they are."""

    def __init__(self, analyzer: Analyzer, names: Names, pinned: Collection[str]) -> None:
        self.analyzer = analyzer
        self.made: dict[
            str, list[Function]
        ] = {}  # versions by the name of the function that they were made from
        self._names = names
        self._pinned = pinned
        self._known: dict[tuple[Scope, frozenset[int]], Version] = {}
        self._unchanged: dict[str, Function] = {}

    def body(self, scope: Scope, kept: Container[Value], stand_in: StandIn) -> tuple[Block, set[Var]]:
        """Return a function's body with `stand_in` in the place of each value in `kept`, and the variables that it reads."""
        rewrite = _Rewrite(self, scope, kept, stand_in)
        for var in scope.calls:  # in their order, so that the first one names its version
            rewrite.version(scope.sites[var])
        return rewrite.block(scope.body), rewrite.needs

    def version(self, scope: Scope, kept: frozenset[int]) -> Version:
        """Return the version of a private function for callers that keep the values with these indices."""
        version = self._known.get((scope, kept))
        if version is None:
            version = self._known[scope, kept] = self._make(scope, kept)
        return version

    def _make(self, scope: Scope, kept: frozenset[int]) -> Version:
        function = scope.function
        names = Names(p.name for p in function.params)
        extra: dict[int, Param] = {}

        def stand_in(value: Value) -> Var:
            if value.index not in extra:
                extra[value.index] = Param(names.unique(value.name), value.type, "transformed")
            return extra[value.index]

        body, needs = self.body(scope, {scope.values.items[i] for i in kept}, stand_in)
        used = frozenset(extra)
        if used != kept and (scope, used) in self._known:
            return self._known[scope, used]
        # What a call gives that weights alone determine depends on none of its other arguments.
        is_known = function.result in scope.known and function.name not in self.analyzer.impure
        formals = tuple(
            i
            for i, p in enumerate(function.params)
            if p in needs or is_number(p) or not (is_known or p in scope.known)
        )
        if body is scope.body and len(formals) == len(function.params):
            version = Version(self._keep(function), formals, (), ())
        else:
            params = [*(function.params[i] for i in formals), *(extra[i] for i in sorted(used))]
            new = Function(
                function.name, tuple(params), body.bindings, body.result, function.kind, function.attrs
            )
            known = definable(p.type for p in function.params)
            lost = sorted(known.intersection(undefined_symbols(new) or ()), key=lambda s: s.key)
            params += [dim_param(names.unique(s.name), of_symbol(s), "input") for s in lost]
            body = renamed(body, [p.name for p in params])
            name = self._name(function.name)
            new = new.with_(name=name, params=tuple(params), bindings=body.bindings, result=body.result)
            self.made.setdefault(function.name, []).append(new)
            version = Version(new, formals, tuple(scope.values.items[i] for i in sorted(used)), tuple(lost))
        self._known[scope, used] = version
        return version

    def _keep(self, function: Function) -> Function:
        """A function that needs no change: itself, unless another version goes by its name."""
        if function.name in self._pinned:
            return function
        if function.name not in self._unchanged:
            name = self._name(function.name)
            kept = self._unchanged[function.name] = (
                function if name == function.name else function.with_(name=name)
            )
            self.made.setdefault(function.name, []).append(kept)
        return self._unchanged[function.name]

    def _name(self, base: str) -> str:
        """The name for a version: the function's own for the first, if nobody else uses it."""
        return self._names.unique(base) if base in self._pinned or self.made.get(base) else base


class _Rewrite:
    """Rewrites one body from its end, so that what is read is known before what computes it."""

    def __init__(self, splitter: Splitter, scope: Scope, kept: Container[Value], stand_in: StandIn) -> None:
        self.splitter = splitter
        self.scope = scope
        self.kept = kept
        self.stand_in = stand_in
        self.needs: set[Var] = set()

    def block(self, block: Block) -> Block:
        """Return a block without bindings that nobody reads."""
        known, impure = self.scope.known, self.splitter.analyzer.impure
        result = self.atom(block.result)
        bindings: list[Binding] = []
        for binding in reversed(block.bindings):
            if binding.var not in self.needs and (
                binding.var in known or not is_alive(binding, self.needs, impure)
            ):
                continue
            value = self.expr(binding)
            bindings.append(binding.with_value(value))
        bindings.reverse()
        is_same = result is block.result and are_same(bindings, block.bindings)
        return block if is_same else Block(tuple(bindings), result)

    def expr(self, binding: Binding) -> Expr:
        """Rewrite the operands of an expression."""
        value = binding.value
        site = self.scope.sites.get(binding.var)
        if site is None:
            return map_expr(value, self.atom, self.block)
        assert isinstance(value, FunctionCall)
        return self.call(value, site)

    def call(self, call: FunctionCall, site: Site) -> FunctionCall:
        """Call the version that fits what is kept here."""
        version = self.version(site)
        args: list[Atom] = [self.atom(call.args[i]) for i in version.formals]
        args += [self.handed(v, site) for v in version.moved]
        if version.dims:
            size = size_map(site.scope.function, call)
            args += [Scalar(size(of_symbol(symbol))) for symbol in version.dims]
        is_same = version.function.name == call.function and are_same(args, call.args)
        return call if is_same else FunctionCall(version.function.name, tuple(args))

    def handed(self, value: Value, site: Site) -> Atom:
        """Return what a callee gets in the place of one of its values."""
        if value.index in site.fields:
            return self.atom(site.fields[value.index])
        image = site.image[value.index]
        assert image is not None
        return self.stand_in(image)

    def version(self, site: Site) -> Version:
        """Return the version of the callee that fits what is kept here."""
        inside = zip(site.scope.values.items, site.image, strict=True)
        kept = [
            v.index
            for v, image in inside
            if v.index in site.fields or (v.expr is not None and image in self.kept)
        ]
        return self.splitter.version(site.scope, frozenset(kept))

    def atom(self, atom: Atom) -> Atom:
        """Return what stands for an operand."""
        if not isinstance(atom, Var):
            return atom
        literal = self.scope.literals.get(atom)
        if literal is not None:
            return literal
        value = self.scope.known.get(atom)
        if value is not None and value in self.kept:
            return self.stand_in(value)
        self.needs.add(atom)
        return atom


def dim_param(name: str, size: Size, role: Role) -> Param:
    """Return a parameter that brings a dim."""
    return Param(name, ScalarType("int64", size), role)


def renamed(body: Block, taken: Iterable[str]) -> Block:
    """Return a body whose variables do not have the names `taken`; the same object if none has."""
    reserved = set(taken)
    bound = [binding.var for binding in walk_bindings(body.bindings)]
    if not any(var.name in reserved for var in bound):
        return body
    names = Names([*reserved, *(var.name for var in bound)])
    return Resizer(None, {}, lambda name: names.unique(name) if name in reserved else name).block(body)
