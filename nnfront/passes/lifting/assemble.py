# SPDX-License-Identifier: Apache-2.0
"""The functions that share one transform: their weights, what they make of them, the transform and the methods after it.

A transform that exists already is taken apart first: its results are values like any others, except that they move again
whatever they cost. So lifting twice changes nothing, and formulas over lifted values join those below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nnfront.dims import Dim, Size, Symbol, of_symbol, to_text
from nnfront.errors import PassError
from nnfront.ir import (
    Atom,
    Binding,
    Function,
    Names,
    Param,
    Scalar,
    Tuple,
    Var,
    infer,
    map_sizes,
    symbols_in,
    type_text,
)
from nnfront.passes.lifting.analyse import Analyzer
from nnfront.passes.lifting.choose_resident import Residents, choose
from nnfront.passes.lifting.dims import KnownDims, definable, matched
from nnfront.passes.lifting.scope import Scope
from nnfront.passes.lifting.split import Splitter, dim_param, renamed
from nnfront.passes.lifting.unify_dims import agreed
from nnfront.passes.lifting.value_graph import Operand, Value, Values, computed_from, resized, with_operands
from nnfront.passes.sizes import map_scalar


class Group:
    """The analysis of functions that share a transform, in the order of their names, and of the transforms they have already."""

    def __init__(
        self,
        analyzer: Analyzer,
        methods: Sequence[Function],
        transforms: Sequence[Function],
        allow_growth: bool,
    ) -> None:
        self.analyzer = analyzer
        methods, transforms = agreed(methods, transforms, analyzer.functions)
        self.methods = methods
        weights = _weights([*transforms, *methods])
        self.dims = KnownDims(p.type for p in weights.values())
        self.values = Values()
        self.leaves = {name: self.values.leaf(name, p.type) for name, p in weights.items()}
        results = {transform.name: self._results(transform) for transform in transforms}
        self.scopes = [
            self._method(method, results.get(method.attrs.get("transform", ""), {})) for method in methods
        ]
        uses = {value: None for scope in self.scopes for value in scope.uses}
        self.residents: Residents = choose(uses, allow_growth)

    def _scope(self, function: Function) -> Scope:
        scope = Scope(function, self.values, self.dims)
        for param in function.params:
            if param.role == "weight":
                scope.known[param] = self.leaves[param.name]
        return scope

    def _results(self, transform: Function) -> dict[str, Operand]:
        """Bring an existing transform into the graph; return its results by name."""
        scope = self._scope(transform)
        self.analyzer.body(scope)
        result = scope.known.get(transform.result) if isinstance(transform.result, Var) else None
        if result is None or not isinstance(result.expr, Tuple) or result.expr.names is None:
            raise PassError(
                f"{transform.name} is not a function of weights alone that returns named results",
                details=[f"{r.name}: {r.reason}" for r in scope.refused],
                help="a transform has weight parameters only, and ops without effects",
            )
        results = dict(zip(result.expr.names, result.operands, strict=True))
        for name, operand in results.items():
            if isinstance(operand, Value) and operand.expr is not None:
                operand.is_fixed, operand.name = True, name
        return results

    def _method(self, method: Function, results: dict[str, Operand]) -> Scope:
        scope = self._scope(method)
        for param in method.params:
            if param.role == "transformed":
                operand = results[param.name]
                if isinstance(operand, Value):
                    scope.known[param] = operand
                else:
                    assert operand is not None
                    scope.literals[param] = operand
        self.analyzer.body(scope)
        return scope

    @property
    def results(self) -> list[Value]:
        """The values that the transform returns: weights as they are, then computed ones."""
        return sorted(self.residents.kept, key=lambda v: (v.expr is not None, v.index))


def _weights(functions: Iterable[Function]) -> dict[str, Param]:
    """Return the weights of all functions by name. Raises PassError if two disagree about the type of one."""
    found: dict[str, tuple[Function, Param]] = {}
    for function in functions:
        for param in function.params:
            if param.role != "weight":
                continue
            first, known = found.setdefault(param.name, (function, param))
            if known.type is not param.type and known.type != param.type:
                raise PassError(
                    f"{first.name} and {function.name} cannot share a transform: they differ in weight '{param.name}'",
                    details=[
                        f"{first.name}: {type_text(known.type)}",
                        f"{function.name}: {type_text(param.type)}",
                    ],
                    help="lift them apart, with shared_transform=False or a list without one of them",
                )
    return {name: param for name, (_, param) in found.items()}


class Assembly:
    """Makes the functions of one group after lifting."""

    def __init__(self, group: Group, splitter: Splitter, name: str) -> None:
        self.group = group
        self.splitter = splitter
        self.name = name
        inputs = [p.name for method in group.methods for p in method.inputs]
        self._names = Names([*group.leaves, *inputs])
        self._result_names = {
            v: v.name if v.expr is None else self._names.unique(v.name) for v in group.results
        }
        self._dims: dict[Size, str] = {}  # what the transform returns of the dims, by name

    def method(self, scope: Scope) -> Function:
        """Return a method with the transform's results in the place of weights. Raises PassError for a dim that is lost."""
        function = scope.function
        params: dict[Value, Param] = {}

        def stand_in(value: Value) -> Var:
            if value not in params:
                params[value] = Param(self._result_names[value], value.type, "transformed")
            return params[value]

        body, _ = self.splitter.body(scope, self._result_names, stand_in)
        results = [params[value] for value in self._result_names if value in params]
        attrs = {name: value for name, value in function.attrs.items() if name != "derived"}
        attrs["transform"] = self.name
        new = Function(
            function.name, (*function.inputs, *results), body.bindings, body.result, function.kind, attrs
        )
        asked = {name for case in attrs.get("special_cases", ()) for name in case}
        needed = {*symbols_in(new), *(symbol for symbol in function.symbols if symbol.name in asked)}
        new = new.with_(params=(*function.inputs, *self._lost_dims(new, needed), *results))
        body = renamed(new.body, [p.name for p in new.params])
        return new.with_(bindings=body.bindings, result=body.result)

    def _lost_dims(self, function: Function, needed: set[Symbol]) -> list[Param]:
        """Parameters for the dims that a method needs and that only weights define, unless they are weights of others."""
        known, types = self.group.dims, [p.type for p in function.params]
        elsewhere = self.group.analyzer.model_dims - known.symbols
        needed = needed - set(matched(function)) - elsewhere
        passed: dict[Size, Param] = {}
        while lost := sorted(
            needed - definable([*types, *(p.type for p in passed.values())]), key=lambda s: s.key
        ):
            sizes: list[Dim] = [of_symbol(symbol) for symbol in lost if symbol in known.symbols]
            if not sizes:
                sizes = [s for s in known.whole if s not in passed and not set(lost).isdisjoint(s.symbols)]
            if not sizes:
                raise PassError(
                    f"{function.name}: no weight and no argument says what '{lost[0]}' is",
                    help=f"make '{lost[0]}' an axis of an argument or of a weight, or an integer argument",
                )
            for size in sizes:
                if size not in self._dims:
                    self._dims[size] = self._names.unique(to_text(size))
                passed[size] = dim_param(self._dims[size], size, "transformed")
        return list(passed.values())

    def transform(self) -> Function:
        """Return the transform. Made after the methods, which say what they need."""
        group, rename = self.group, self.group.dims.rename
        params = {
            leaf: Param(name, map_sizes(leaf.type, rename), "weight") for name, leaf in group.leaves.items()
        }
        variables: dict[Value, Var] = dict(params)
        taken = Names([*group.leaves, *self._result_names.values(), *self._dims.values()])
        bindings: list[Binding] = []
        for value in computed_from(self._result_names):
            if value.expr is None:
                continue
            atoms = [
                variables[o] if isinstance(o, Value) else o and map_scalar(o, rename) for o in value.operands
            ]
            name = self._result_names.get(value) or taken.unique(value.name)
            variables[value] = Var(name, map_sizes(value.type, rename))
            expr = with_operands(resized(value.expr, rename), atoms)
            bindings.append(Binding(variables[value], expr, value.provenance))
        fields: list[Atom] = [Scalar(rename(size)) for size in self._dims]
        fields += [variables[value] for value in self._result_names]
        made = Tuple(tuple(fields), (*self._dims.values(), *self._result_names.values()))
        result = Var(taken.unique("results"), infer(made, {}))
        derived = tuple(name for v, name in self._result_names.items() if v.declared_in is not None)
        attrs = {"derived": derived} if derived else {}
        return Function(
            self.name, tuple(params.values()), (*bindings, Binding(result, made)), result, "transform", attrs
        )
