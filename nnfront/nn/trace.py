# SPDX-License-Identifier: Apache-2.0
"""The tracing mode: each op that a method applies becomes a binding, each use of a parameter or formula a weight.

A `Trace` does not know `Module`: it works on a `Tree` of parameters and names. `loop` and `shared_layers` make private functions with it, `methods` whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch

from nnfront import ops
from nnfront.dims import Dim, Symbol, with_facts
from nnfront.errors import InferError, TraceError
from nnfront.ir import (
    Atom,
    Block,
    Call,
    Function,
    If,
    Names,
    ObjectType,
    Op,
    Projection,
    Provenance,
    Scalar,
    ScalarType,
    StateLayerType,
    StateType,
    TensorType,
    Tuple,
    TupleType,
    Type,
    Var,
)
from nnfront.nn.cache import Cache, CacheLayer
from nnfront.nn.dim_facts import with_facts_attr
from nnfront.nn.foreign import explain
from nnfront.nn.mode import located, out_of_trace
from nnfront.nn.opaque import Object, kind_of
from nnfront.nn.parameter import Parameter
from nnfront.nn.pytree import flatten, unflatten
from nnfront.nn.source_location import author_frame, user_frame
from nnfront.nn.tensor import Formula, FormulaCall, Tensor, as_operand
from nnfront.nn.trace_state import Frame, Tree
from nnfront.ops.constants import constant


class Trace:
    """The tracing mode: one export of one or several methods into one module."""

    def __init__(self, tree: Tree, facts: Mapping[Symbol, Symbol], reserved: Iterable[str] = ()) -> None:
        self.tree = tree
        self.facts = facts
        self.functions: dict[str, Function] = {}
        self.function_names = Names(reserved)
        self.frame: Frame
        self._types: dict[Type, Type] = {}
        self.effects: dict[int, tuple[Tensor, ...]] = {}
        self.method = ""
        self.path = ""
        # Who exports: no line of it is one of the methods', some of which are the library's own.
        self.outside = author_frame()

    # What ops do.

    def apply(self, op: Op, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Any:
        """Emit a call of `op` and return its results as the author's objects."""
        sees = self.frame.builder.sees
        atoms = tuple(
            [
                a.content
                if type(a) is Tensor and type(a.content) is Var and sees(a.content)
                else self.atom(a, op)
                for a in args
            ]
        )
        types = [None if a is None else a.type for a in atoms]
        try:
            attrs = self.known_attrs(op.canonical_attrs(types, attrs))
            result = op.result_type(types, attrs)
        except InferError as error:
            raise located(error, op, types, "") from None
        var = self.frame.builder.emit(Call(op, atoms, attrs), op.name, self.provenance(), result)
        if type(result) is TensorType:
            return Tensor(result, var)
        return self.results(var, result, [a for a in args if isinstance(a, CacheLayer)])

    def results(self, var: Var, type: Type, layers: list[CacheLayer], kinds: Sequence[Any] = ()) -> Any:
        """Wrap a result that is not a tensor; written handles go back to their layers and are not the author's to see."""
        if isinstance(type, StateLayerType):
            layers[0].handle = var
            return None
        if not isinstance(type, TupleType):
            return self.wrap(var, type)
        results = []
        written = iter(layers)
        for i, field_type in enumerate(type.fields):
            part = self.frame.builder.emit(Projection(var, i), var.name, None, field_type)
            if isinstance(field_type, StateLayerType):
                next(written).handle = part
            else:
                results.append(self.wrap(part, field_type, kinds[i] if kinds else Object))
        if layers and len(results) == 1:
            return results[0]
        return tuple(results) if results else None

    def wrap(self, var: Var, type: Type, kind: Any = Object) -> Any:
        """Return the author's object for a variable. `kind`: the class of an opaque value, one for each field of a tuple."""
        match type:
            case TensorType():
                return Tensor(type, var)
            case TupleType() if not type.fields:
                return None
            case TupleType():
                return self.results(var, type, [], kind if isinstance(kind, tuple) else ())
            case ScalarType():
                return type.value if type.value is not None else var
            case ObjectType():
                return kind.traced(var)
            case StateType():
                return Cache(type, self._split(var, type))
            case _:
                raise TraceError(f"a method cannot use a value of type {type}")

    def _split(self, cache: Var, type: StateType) -> list[CacheLayer]:
        """Emit the handles of all layers of a cache."""
        builder = self.frame.builder
        parts = builder.call(ops.cache_split, cache)
        name = f"{cache.name}_layer"
        return [
            CacheLayer(t, builder.emit(Projection(parts, i), name, None, t))
            for i, t in enumerate(type.layers)
        ]

    def cond(self, predicate: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Emit an `if`; caches that one branch writes come out of both."""
        frame, builder = self.frame, self.frame.builder
        condition = self.atom(predicate, ops.logical_not)
        if condition is None or condition.type not in (ScalarType("bool"), TensorType((), "bool")):
            raise TraceError(
                f"op.cond: the predicate is {predicate!r}, not a bool without axes",
                help="compare, as in x > 0, and reduce with op.any or op.all",
            )
        handles = [(layer, layer.handle) for layer in frame.layers]
        traced = []
        for run in (then, otherwise):
            for layer, handle in handles:
                layer.handle = handle
            with builder.block() as bindings:
                structure, leaves = flatten(run(), lambda x: isinstance(x, (Tensor, Object, torch.Tensor)))
                traced.append(
                    (
                        bindings,
                        structure,
                        [self.atom(leaf, ops.where) for leaf in leaves],
                        [(x, x.handle) for x, _ in handles],
                    )
                )
            kinds = [kind_of(leaf) for leaf in leaves]
        (_, structure, leaves_a, handles_a), (_, other, leaves_b, handles_b) = traced
        if structure != other or len(leaves_a) != len(leaves_b):
            raise TraceError(
                "op.cond: the branches return values of different structure",
                details=[f"then {structure!r}", f"else {other!r}"],
                help="return the same number of tensors, in the same lists and dicts, from both; and the same numbers",
            )
        written = [
            i
            for i, (_, before) in enumerate(handles)
            if handles_a[i][1] is not before or handles_b[i][1] is not before
        ]
        blocks = []
        for bindings, _, leaves, after in traced:
            fields = [a for a in leaves if a is not None] + [after[i][1] for i in written]
            with builder.block() as tail:
                result = fields[0] if len(fields) == 1 else builder.emit(Tuple(tuple(fields)))
            blocks.append(Block((*bindings, *tail), result))
        try:
            var = builder.emit(If(condition, *blocks), "cond", self.provenance())
        except InferError as error:
            raise TraceError(
                f"op.cond: {error.what}",
                details=error.details,
                help="cast with astype, or reshape, in one of them",
            ) from None
        parts = [var]
        if isinstance(var.type, TupleType):
            parts = [
                builder.emit(Projection(var, i), var.name, None, t) for i, t in enumerate(var.type.fields)
            ]
        for i, part in zip(written, parts[len(leaves_a) :], strict=True):
            handles[i][0].handle = part
        return unflatten(structure, [self.wrap(p, p.type, k) for p, k in zip(parts, kinds, strict=False)])

    def changes_effects(self, before: Mapping[int, tuple[Tensor, ...]]) -> bool:
        """Whether the state of an effect is another than it was."""
        after = self.effects
        return after.keys() != before.keys() or any(after[key] is not state for key, state in before.items())

    # Operands.

    def atom(self, x: Any, op: Op) -> Atom | None:
        """Return the atom for anything an author may pass to an op."""
        x = x if isinstance(x, (Tensor, CacheLayer, Object, Cache)) else as_operand(x, op)
        if isinstance(x, Tensor):
            content = x.content
            if isinstance(content, Var):
                return content if self.frame.builder.sees(content) else self._foreign(x, content)
            if isinstance(content, torch.Tensor):
                return constant(content)
            return self.weight(x)
        if isinstance(x, (CacheLayer, Object, Cache)):
            handle = x.handle if isinstance(x, CacheLayer) else getattr(x, "content", None)
            if not isinstance(handle, Var):
                raise TraceError(
                    f"{op.name}: {x!r} is no operand",
                    help="give one layer, cache[i]"
                    if isinstance(x, Cache)
                    else "objects come as arguments, by spec.Object, or from op.extern",
                )
            return handle if self.frame.builder.sees(handle) else self._foreign(x, handle)
        return None if x is None else Scalar(with_facts_attr(x, self.facts))

    def _foreign(self, x: Any, var: Var) -> Var:
        """Return what stands for a variable of a function around this one: the body of a loop takes it as one more parameter.

        A shared body does not, and is not shared then. A variable of no function around is refused.
        """
        found = self.frame.stand_in(var)
        if found is None:
            raise out_of_trace(x)
        return found

    def weight(self, tensor: Tensor, frame: Frame | None = None) -> Var:
        """Return the variable of a parameter or derived tensor in `frame`, made when it is first asked for."""
        frame = frame or self.frame
        known = frame.weights.get(id(tensor))
        if known is not None:
            return known
        name = self.tree.names.get(id(tensor), "")
        if frame.parent is not None and frame.captured is not None:
            found = frame.stand_in(self.weight(tensor, frame.parent))
            assert found is not None
            var: Var = found
        elif frame.parent is not None:
            local = name.removeprefix(f"{frame.prefix}.") or "derived"
            var = frame.builder.param(local, self.with_facts(tensor.type), "weight")
            frame.reads.append(tensor)
        elif isinstance(tensor.content, Formula):
            var = self._formula(tensor.content, name, frame)
            if name:
                frame.derived.append(var.name)
        elif isinstance(tensor, Parameter):
            if self.tree.parameters.get(name) is not tensor:
                raise TraceError(
                    f"{tensor!r} is not part of the module that is exported",
                    help="assign it to an attribute of the module, or of one below it",
                )
            var = frame.builder.param(name, self.with_facts(tensor.type), "weight")
        else:
            raise TraceError(f"{tensor!r} is a placeholder; it has no value")
        frame.weights[id(tensor)] = var
        frame.kept.append(tensor)
        return var

    def _formula(self, formula: Formula, name: str, frame: Frame) -> Var:
        """Emit a derived tensor, once in a method, ahead of any branch."""
        call, builder = formula.call, frame.builder
        var = frame.weights.get(id(call))
        with builder.outermost():
            if var is None:
                atoms = self._formula_operands(call, name, frame)
                file, _, line = call.where.rpartition(":")
                attrs = self.known_attrs(call.attrs)
                type_ = self._shared(call.type_of([None if a is None else a.type for a in atoms], attrs))
                place = Provenance(name.rpartition(".")[0], file, int(line or 0))
                hint = name if name and formula.index is None else call.op.name
                var = builder.emit(Call(call.op, atoms, attrs), hint, place, type_)
                frame.weights[id(call)] = var
                frame.kept.append(call)
            if formula.index is None:
                return var
            return builder.emit(Projection(var, formula.index), name or var.name)

    def _shared(self, type_: Type) -> Type:
        """Return one and the same object for equal types without dims: layers that are alike are then quick to compare."""
        is_plain = isinstance(type_, TensorType) and Dim not in map(type, type_.shape)
        return self._types.setdefault(type_, type_) if is_plain else type_

    def _formula_operands(self, call: FormulaCall, name: str, frame: Frame) -> tuple[Atom | None, ...]:
        try:
            return tuple([self._formula_operand(a, frame) for a in call.args])
        except TraceError as error:
            if error.details:  # a formula inside this one has said it
                raise
            formula = f"the derived tensor {name!r}" if name else "a formula"
            said = f"it is an operand of {call.op.name} in {formula}, written at {call.where}"
            raise TraceError(error.what, details=[said], where=error.where, help=error.help) from None

    def _formula_operand(self, x: Any, frame: Frame) -> Atom | None:
        if isinstance(x, Tensor):
            return constant(x.content) if isinstance(x.content, torch.Tensor) else self.weight(x, frame)
        return None if x is None else Scalar(with_facts_attr(x, self.facts))

    def with_facts(self, type: TensorType) -> TensorType:
        """Return the type with the facts that this export knows of its dims."""
        if not self.facts or type.static_shape is not None:
            return type
        return TensorType(tuple(with_facts(s, self.facts) for s in type.shape), type.dtype)

    def known_attrs(self, attrs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return attributes with the facts that this export knows of the dims in them."""
        if not self.facts or not attrs:
            return attrs
        known = {name: with_facts_attr(value, self.facts) for name, value in attrs.items()}
        return attrs if all(map(is_, known.values(), attrs.values())) else known

    # Places.

    def provenance(self) -> Provenance:
        """Return where the op that is being emitted comes from."""
        file, line = user_frame(self.outside)
        return Provenance(self.path, file, line)

    def explain(self, error: Exception, definition: Provenance | None = None) -> None:
        """Give an error that comes out of the author's code its place, as `foreign.explain` does."""
        explain(error, f"{self.frame.prefix}.{self.path}".strip("."), self.method, definition)

    def allow_change(self, owner: Any, what: str) -> None:
        """Refuse to change what the tree holds."""
        path = self.tree.names.get(id(owner))
        if path is not None:
            raise TraceError(
                f"attribute {what!r} of {path or 'the module'} changes while the method is traced",
                help="export leaves a module as it was: return the value, or compute it in __init__",
            )
