# SPDX-License-Identifier: Apache-2.0
"""Which bindings compute values that weights alone determine, and what run-time work reads of them.

A private function is analysed once for each set of parameters that hold such values; a call brings its findings into the
caller's graph. So a layer that occurs eighty times costs eighty times its few weight computations, not its whole body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from nnfront.dims import Dim, substitute
from nnfront.ir import (
    NO_FACTS,
    Atom,
    Binding,
    Block,
    Call,
    Constant,
    Expr,
    Facts,
    Function,
    FunctionCall,
    If,
    IRModule,
    Names,
    Projection,
    Scalar,
    TensorType,
    Tuple,
    TupleType,
    Type,
    Var,
    are_same,
    atoms_of,
    branch_facts,
    call_sizes,
    map_sizes,
    sizes_of,
)
from nnfront.ir.walk import sizes_in_atoms, sizes_in_attrs, sizes_read
from nnfront.passes.effects import Declaration, impure_functions, is_pure
from nnfront.passes.lifting.branches import Branch, general_type
from nnfront.passes.lifting.dims import KnownDims, definable
from nnfront.passes.lifting.scope import Refusal, Scope, Site, collect_uses
from nnfront.passes.lifting.value_graph import Operand, Value, Values, computed_from, resized, with_operands
from nnfront.passes.sizes import SizeMap, map_scalar


class Analyzer:
    """Analyses the functions of one module."""

    def __init__(self, ir: IRModule) -> None:
        self.functions: Mapping[str, Function] = ir
        self.impure = impure_functions(ir)
        public = [f for f in ir.functions if f.kind in ("public", "transform")]
        self.model_dims = definable(p.type for f in public for p in f.weights)
        """The dims that the weights of the whole model define."""
        self._private: dict[tuple[str, tuple[bool, ...]], Scope] = {}

    def private(self, name: str, pattern: tuple[bool, ...]) -> Scope:
        """Analyse a private function whose parameters marked in `pattern` are known when weights are loaded."""
        scope = self._private.get((name, pattern))
        if scope is None:
            function = self.functions[name]
            marked = [p for p, is_known in zip(function.params, pattern, strict=True) if is_known]
            scope = Scope(function, Values(), KnownDims(p.type for p in marked))
            for param in marked:
                scope.known[param] = scope.values.leaf(param.name, param.type)
            self.body(scope)
            scope.has_dims = any(_has_dims(value) for value in scope.values.items)
            self._private[name, pattern] = scope
        return scope

    def body(self, scope: Scope) -> None:
        """Analyse a function whose known parameters are in the scope already."""
        declared = frozenset(scope.function.attrs.get("derived", ()))
        scope.body = _Forward(self, scope, declared).block(scope.body)
        collect_uses(scope, self.impure)


class _Forward:
    """Finds the variables whose value weights alone determine.

    A field of a known tuple is a value by itself, kept or not whatever becomes of the rest of the tuple: what reads one is
    rewritten to read `homes`, the variable that holds the value here.
    """

    def __init__(self, analyzer: Analyzer, scope: Scope, declared: frozenset[str]) -> None:
        self.analyzer = analyzer
        self.scope = scope
        self.declared = declared
        self.homes: dict[Value, Atom] = {value: var for var, value in scope.known.items()}
        self.bindings: list[Binding] = []
        self.branch: Branch | None = None
        """The one that is looked at, if it knows more of the weights' dims than the function."""
        self._names: Names | None = None

    def block(self, block: Block) -> Block:
        """Find the known values of a block; return it with the fields of known tuples read where they are."""
        outer = self.homes, self.bindings
        self.homes, self.bindings = dict(self.homes), []
        for binding in block.bindings:
            self._binding(binding)
        bindings = tuple(self.bindings)
        self.homes, self.bindings = outer
        return block if are_same(bindings, block.bindings) else Block(bindings, block.result)

    def _binding(self, binding: Binding) -> None:
        known, value = self.scope.known, binding.value
        if isinstance(value, If):
            then, otherwise = self._branches(value)
            if then is not value.then or otherwise is not value.otherwise:
                binding = replace(binding, value=If(value.condition, then, otherwise))
            self.bindings.append(binding)
            return
        if isinstance(value, FunctionCall):
            found = self._call(binding, value)
        elif isinstance(value, Var):
            found = known.get(value)
        else:
            found = self._expr(binding, value)
        if found is not None:
            known[binding.var] = found
            if binding.var.name in self.declared:
                found.is_fixed, found.name = True, binding.var.name
                found.declared_in = binding.provenance.module if binding.provenance else ""
            if isinstance(value, Projection) and self._is_put_together(value.tuple):
                binding = replace(binding, value=self._home(found))
            self.homes.setdefault(found, binding.var)
        self.bindings.append(binding)

    def _is_put_together(self, atom: Atom) -> bool:
        """Whether something is a known tuple of values that are known one by one."""
        return isinstance(atom, Var) and isinstance(self.scope.known[atom].expr, Tuple)

    def _home(self, value: Value) -> Atom:
        """Return what holds a value at this place; it is computed here if only a called function has it."""
        for part in computed_from([value], self.homes):
            assert part.expr is not None
            expr = with_operands(
                part.expr, [self.homes[o] if isinstance(o, Value) else o for o in part.operands]
            )
            if isinstance(expr, Constant | Scalar):
                self.homes[part] = expr
                continue
            if self._names is None:
                self._names = Names.of(self.scope.function)
            var = self.homes[part] = Var(self._names.unique(part.name), part.type)
            self.scope.known[var] = part
            self.bindings.append(Binding(var, expr, part.provenance))
        return self.homes[value]

    def _branches(self, value: If) -> tuple[Block, Block]:
        """Look at both branches; first at that which knows less, so that the other one finds its values."""
        outer, dims = self.branch, self.scope.dims
        known = self.facts.get(id(value), NO_FACTS)
        of_weights = {symbol: size for symbol, size in known.items() if dims.is_of_weights(symbol)}
        if not of_weights:
            return self.block(value.then), self.block(value.otherwise)
        otherwise = self.block(value.otherwise)
        self.branch = Branch(self.scope.values, of_weights)
        then = self.block(value.then)
        self.branch = outer
        return then, otherwise

    @cached_property
    def facts(self) -> Mapping[int, Facts]:
        """By the id of each `if`, what is known of dims where its condition holds."""
        return branch_facts(self.scope.function)

    def _expr(self, binding: Binding, value: Expr) -> Value | None:
        known = self.scope.known
        operands: list[Operand] = []
        for atom in atoms_of(value):
            if isinstance(atom, Var):
                operand = known.get(atom)
                if operand is None:
                    return None
                operands.append(operand)
            else:
                operands.append(atom)
        type: Type | None = binding.var.type
        if self.branch is not None:
            found = self.branch.find(value, operands)
            if found is not None:
                return found
            type = general_type(value, operands)
        reason = self._refuse(value, type)
        if type is None or reason:
            if any(isinstance(o, Value) and o.uses_weight for o in operands):
                self.scope.refused.append(Refusal(binding.var.name, reason))
            return None
        name = "" if _is_automatic(binding) else binding.var.name
        return self.scope.values.make(value, operands, type, name, binding.provenance)

    def _refuse(self, value: Expr, type: Type | None) -> str:
        if type is None:
            return "it is defined in a special case only"
        if isinstance(value, Call):
            if not is_pure(value, self.analyzer.impure):
                return "it has an effect"
            if value.op.name == "stop_lift_params":
                return "stop_lift_params keeps it"
        if not isinstance(type, (TensorType, TupleType)) and not isinstance(
            value, (Constant, Scalar, Projection)
        ):
            return "it is no tensor"
        unknown = self.scope.dims.first_unknown([*sizes_of(type), *sizes_read(value)])
        return "" if unknown is None else f"its size '{unknown}' is not known when weights are loaded"

    def _call(self, binding: Binding, call: FunctionCall) -> Value | None:
        """Bring the callee's values into this graph; return the call's own if weights alone determine it."""
        callee = self.analyzer.functions[call.function]
        args = [self._argument(atom) for atom in call.args]
        if isinstance(callee, Declaration):
            if all(args) and any(a.uses_weight for a in args if a is not None):
                reason = f"{callee.name} is {callee.kind}, and its calls are left as they are"
                self.scope.refused.append(Refusal(binding.var.name, reason))
            return None
        path = binding.provenance.module if binding.provenance else ""
        scope = self.analyzer.private(callee.name, tuple(a is not None for a in args))
        image = instantiate(scope, args, call, self.scope, path, self.branch)
        if image is None:
            scope = self.analyzer.private(callee.name, (False,) * len(args))
            self.scope.sites[binding.var] = Site(scope, [None] * len(scope.values.items), path)
            return None
        fields = {
            v.index: self._home(image[v.index])
            for v in scope.values.items
            if isinstance(v.expr, Projection) and _is_field(v, image)
        }
        self.scope.sites[binding.var] = Site(scope, image, path, fields)
        result = scope.known.get(callee.result) if isinstance(callee.result, Var) else None
        return None if result is None or callee.name in self.analyzer.impure else image[result.index]

    def _argument(self, atom: Atom) -> Value | None:
        if isinstance(atom, Var):
            return self.scope.known.get(atom)
        if self.scope.dims.first_unknown(sizes_of(atom.type)) is not None:
            return None
        return self.scope.values.make(atom, (atom,), atom.type)


def instantiate(
    callee: Scope,
    args: Sequence[Value | None],
    call: FunctionCall,
    caller: Scope,
    path: str,
    branch: Branch | None,
) -> list[Value] | None:
    """Return what each of the callee's values is in the caller's graph; None if the caller does not know a size of one.

    `branch` is where the call is, if more is known there than in every call; None, too, if a value is defined there only.
    """
    image: list[Value] = []
    size = size_map(callee.function, call) if callee.has_dims else None
    formals = iter([a for a in args if a is not None])
    for value in callee.values.items:
        if value.expr is None:
            image.append(next(formals))
            continue
        expr, type = value.expr, value.type
        operands: list[Operand] = [image[o.index] if isinstance(o, Value) else o for o in value.operands]
        if size is not None:
            operands = [o if isinstance(o, Value) or o is None else map_scalar(o, size) for o in operands]
            # The callee's own operands are not the caller's: their sizes are not asked for.
            expr, type = resized(expr, size), map_sizes(type, size)
            sizes = (*sizes_of(type), *sizes_in_attrs(expr), *sizes_in_atoms(operands))
            if caller.dims.first_unknown(sizes) is not None:
                return None
        made = None if branch is None else branch.find(expr, operands)
        if made is None:
            general = type if branch is None else general_type(expr, operands)
            if general is None:
                return None
            name = _join(path, value.name) if value.is_named else ""
            place = value.provenance and value.provenance.inside(path)
            made = caller.values.make(expr, operands, general, name, place)
        if value.declared_in is not None:
            made.is_fixed, made.declared_in = True, _join(path, value.declared_in)
        image.append(made)
    return image


def size_map(callee: Function, call: FunctionCall) -> SizeMap:
    """Return the function from the callee's sizes to the caller's."""
    bound, _ = call_sizes(callee, [arg.type for arg in call.args])
    return lambda size: substitute(size, bound)


def _is_field(value: Value, image: Sequence[Value]) -> bool:
    """Whether a projection of a callee is a field of a tuple that its caller has put together."""
    (source,) = value.inputs
    return isinstance(image[source.index].expr, Tuple)


def _has_dims(value: Value) -> bool:
    if Dim in map(type, sizes_of(value.type)):
        return True
    return value.expr is not None and next(sizes_read(value.expr), None) is not None


def _is_automatic(binding: Binding) -> bool:
    """Whether the variable's name was made from the expression, and says nothing about what it is for."""
    value = binding.value
    if isinstance(value, Projection) and isinstance(value.tuple, Var):
        return _stem(binding.var.name) == _stem(value.tuple.name)
    return isinstance(value, Call) and _stem(binding.var.name) == value.op.name.rstrip("_")


def _stem(name: str) -> str:
    stem, _, number = name.rpartition("_")
    return stem if number.isdecimal() else name


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
