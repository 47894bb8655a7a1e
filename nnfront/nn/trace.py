# SPDX-License-Identifier: Apache-2.0
"""Run methods on traced tensors and collect what they do as an IR module.

`trace` takes functions, parameters and specs; it does not know `Module`. A `Trace` is the mode that is active meanwhile:
each op becomes a binding, each use of a parameter or formula a weight of the function. A module that occurs many times is
traced once into a private function, whose parameters are the weights it read, and called from then on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from nnfront import ops
from nnfront.dims import Dim, Symbol, strict_comparisons, with_facts
from nnfront.errors import InferError, NnfrontError, TraceError
from nnfront.ir import (
    NO_ATTRS,
    Atom,
    CacheLayerType,
    CacheType,
    Call,
    Constant,
    Function,
    FunctionBuilder,
    FunctionCall,
    If,
    IRModule,
    Names,
    ObjectType,
    Op,
    Projection,
    Provenance,
    Scalar,
    ScalarType,
    TensorType,
    Tuple,
    TupleType,
    Type,
    Var,
    branch,
    walk_exprs,
)
from nnfront.nn import spec as specs
from nnfront.nn.arguments import argument_type, known_facts, with_facts_type
from nnfront.nn.cache import Cache, CacheLayer
from nnfront.nn.effect import Effect
from nnfront.nn.frame import Frame, Tree
from nnfront.nn.object import Object
from nnfront.nn.parameter import Parameter
from nnfront.nn.structure import flatten, unflatten
from nnfront.nn.subroutine import Subroutines
from nnfront.nn.tensor import Formula, Tensor, active_mode, as_operand, located, user_frame


class Trace:
    """The tracing mode: one export of one or several methods into one module."""

    def __init__(self, tree: Tree, facts: Mapping[Symbol, Symbol], reserved: Iterable[str] = ()) -> None:
        self.tree = tree
        self.facts = facts
        self.functions: dict[str, Function] = {}
        self.function_names = Names(reserved)
        self.subroutines = Subroutines(self)
        self.frame: Frame
        self.effects: dict[int, tuple[Tensor, ...]] = {}
        self.method = ""
        self.path = ""

    # What ops do.

    def apply(self, op: Op, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Any:
        """Emit a call of `op` and return its results as the author's objects."""
        atoms = tuple(
            [a.content if type(a) is Tensor and type(a.content) is Var else self.atom(a, op) for a in args]
        )
        types = [None if a is None else a.type for a in atoms]
        try:
            attrs = op.canonical_attrs(types, attrs)
            result = op.result_type(types, attrs)
        except InferError as error:
            raise located(error, op, types, self.where()) from None
        var = self.frame.builder.emit(Call(op, atoms, attrs), op.name, self.provenance(), result)
        if type(result) is TensorType:
            return Tensor(result, var)
        return self.results(var, result, [a for a in args if isinstance(a, CacheLayer)])

    def results(self, var: Var, type: Type, layers: list[CacheLayer]) -> Any:
        """Wrap a result that is not a tensor; written handles go back to their layers and are not the author's to see."""
        if not isinstance(type, TupleType):
            return self.wrap(var, type)
        results = []
        written = iter(layers)
        for i, field_type in enumerate(type.fields):
            part = self.frame.builder.emit(Projection(var, i), var.name, None, field_type)
            if isinstance(field_type, CacheLayerType):
                next(written).handle = part
            else:
                results.append(self.wrap(part, field_type))
        if layers and len(results) == 1:
            return results[0]
        return tuple(results) if results else None

    def wrap(self, var: Var, type: Type) -> Any:
        """Return the author's object for a variable."""
        match type:
            case TensorType():
                return Tensor(type, var)
            case TupleType() if not type.fields:
                return None
            case TupleType():
                return self.results(var, type, [])
            case ScalarType():
                return type.value if type.value is not None else var
            case ObjectType():
                return Object.traced(var)
            case CacheType():
                return Cache(type, self._split(var, type))
            case _:
                raise TraceError(f"a method cannot use a value of type {type}", where=self.where())

    def _split(self, cache: Var, type: CacheType) -> list[CacheLayer]:
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
        condition = self.atom(predicate, ops.where)
        if condition is None:
            raise TraceError("op.cond: the predicate is None", where=self.where())
        handles = [(layer, layer.handle) for layer in frame.layers]
        traced = []
        for run in (then, otherwise):
            for layer, handle in handles:
                layer.handle = handle
            with builder.block() as bindings:
                leaves: list[Any] = []
                structure = flatten(run(), _is_leaf, leaves)
                traced.append(
                    (
                        bindings,
                        structure,
                        [self.atom(leaf, ops.where) for leaf in leaves],
                        [(x, x.handle) for x, _ in handles],
                    )
                )
        (_, structure, leaves_a, handles_a), (_, other, leaves_b, handles_b) = traced
        if structure != other or len(leaves_a) != len(leaves_b):
            raise TraceError("op.cond: the branches return values of different structure", where=self.where())
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
            blocks.append(branch([*bindings, *tail], result))
        try:
            var = builder.emit(If(condition, *blocks), "cond", self.provenance())
        except InferError as error:
            raise TraceError(f"op.cond: {error.what}", where=self.where()) from None
        parts = [var]
        if isinstance(var.type, TupleType):
            parts = [
                builder.emit(Projection(var, i), var.name, None, t) for i, t in enumerate(var.type.fields)
            ]
        for i, part in zip(written, parts[len(leaves_a) :], strict=True):
            handles[i][0].handle = part
        return unflatten(structure, [self.wrap(p, p.type) for p in parts[: len(leaves_a)]])

    # Modules.

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module's forward, through a private function if its trace is shared."""
        outer = self.path
        path = self.tree.names.get(id(module))
        if path is None:  # made inside the method
            self.path = f"{outer}.{type(module).__name__}".lstrip(".")
        else:
            prefix = self.frame.prefix
            self.path = path[len(prefix) + 1 :] if prefix and path.startswith(prefix) else path
        try:
            if id(module) in self.tree.shareable:
                called, result = self.subroutines.call(module, path or "", args, kwargs)
                if called:
                    return result
            return module.forward(*args, **kwargs)
        finally:
            self.path = outer

    # Operands.

    def atom(self, x: Any, op: Op) -> Atom | None:
        """Return the atom for anything an author may pass to an op."""
        x = x if isinstance(x, (CacheLayer, Object, Cache)) else as_operand(x, op)
        if x is None:
            return None
        if isinstance(x, Tensor):
            content = x.content
            if isinstance(content, Var):
                return content
            if isinstance(content, torch.Tensor):
                return constant(content)
            return self.weight(x)
        if isinstance(x, CacheLayer):
            return x.handle
        if isinstance(x, (Object, Cache)):
            handle = x.content if isinstance(x, Object) else None
            if not isinstance(handle, Var):
                raise TraceError(f"{x!r} is not an argument of the method", where=self.where())
            return handle
        return Scalar(x)

    def weight(self, tensor: Tensor, frame: Frame | None = None) -> Var:
        """Return the variable of a parameter or derived tensor in `frame`, made when it is first asked for."""
        frame = frame or self.frame
        known = frame.weights.get(id(tensor))
        if known is not None:
            return known
        name = self.tree.names.get(id(tensor), "")
        if frame.parent is not None:
            local = name.removeprefix(f"{frame.prefix}.") or "derived"
            var: Var = frame.builder.param(local, self.with_facts(tensor.type), "weight")
            frame.reads.append(tensor)
        elif isinstance(tensor.content, Formula):
            var = self._formula(tensor.content, name, frame)
            if name:
                frame.derived.append(var.name)
        elif isinstance(tensor, Parameter):
            if self.tree.parameters.get(name) is not tensor:
                raise TraceError(
                    f"{tensor!r} is not part of the module that is exported",
                    where=self.where(),
                    help="assign it to an attribute of the module, or of one below it",
                )
            var = frame.builder.param(name, self.with_facts(tensor.type), "weight")
        else:
            raise TraceError(f"{tensor!r} is a placeholder; it has no value", where=self.where())
        frame.weights[id(tensor)] = var
        frame.kept.append(tensor)
        return var

    def _formula(self, formula: Formula, name: str, frame: Frame) -> Var:
        """Emit a derived tensor, once in a method, ahead of any branch."""
        call, builder = formula.call, frame.builder
        var = frame.weights.get(id(call))
        with builder.outermost():
            if var is None:
                atoms = tuple([self._formula_operand(a, frame) for a in call.args])
                file, _, line = call.where.rpartition(":")
                types = [None if a is None else a.type for a in atoms]
                try:
                    type_ = call.op.result_type(types, call.attrs)
                except InferError as error:
                    raise located(error, call.op, types, call.where) from None
                place = Provenance(name.rpartition(".")[0], file, int(line or 0))
                hint = name if name and formula.index is None else call.op.name
                var = builder.emit(Call(call.op, atoms, call.attrs), hint, place, type_)
                frame.weights[id(call)] = var
                frame.kept.append(call)
            if formula.index is None:
                return var
            return builder.emit(Projection(var, formula.index), name or var.name)

    def _formula_operand(self, x: Any, frame: Frame) -> Atom | None:
        if isinstance(x, Tensor):
            return constant(x.content) if isinstance(x.content, torch.Tensor) else self.weight(x, frame)
        return None if x is None else Scalar(x)

    def with_facts(self, type: TensorType) -> TensorType:
        """Return the type with the facts that this export knows of its dims."""
        if not self.facts or all(isinstance(s, int) for s in type.shape):
            return type
        return TensorType(tuple(with_facts(s, self.facts) for s in type.shape), type.dtype)

    # Places.

    def provenance(self) -> Provenance:
        """Return where the op that is being emitted comes from."""
        file, line = user_frame()
        return Provenance(self.path, file, line)

    def where(self) -> str:
        """Return the place for an error: module path, method, source line."""
        file, line = user_frame()
        prefix = self.frame.prefix
        path = f"{prefix}.{self.path}".strip(".") if prefix else self.path
        inside = f"{path} in " if path else ""
        return f"{inside}method {self.method!r} ({file}:{line})"

    # Methods.

    def method_function(self, name: str, spec: specs.MethodSpec) -> Function:
        """Trace one method."""
        self.method, self.path = name, ""
        self.frame = frame = Frame(FunctionBuilder(name, self.functions))
        frame.builder.place = _definition(spec.method)
        arguments = {key: self._argument(key, value) for key, value in spec.arguments.items()}
        caches = [value for value in arguments.values() if isinstance(value, Cache)]
        threaded = self.tree.effects if spec.effect_mode != "none" else {}
        self.effects = {id(effect): self._state(path, effect) for path, effect in threaded.items()}
        token = active_mode.set(self)
        try:
            with strict_comparisons():
                value = spec.method(**arguments)
        except NnfrontError as error:
            if not error.where:
                error.where = self.where()
            raise
        finally:
            active_mode.reset(token)
        if spec.param_mode == "none" and frame.weights:
            names = [w.name for w in frame.builder.params if w.role == "weight"]
            raise TraceError(
                f"{name}: param_mode is 'none', but the method reads {', '.join(map(repr, names[:3]))}"
            )
        frame.builder.place = _definition(spec.method)
        result = self._result(name, value)
        if threaded:
            states = [self.atom(t, ops.where) for effect in threaded.values() for t in self.effects[id(effect)]]
            result = frame.builder.emit(Tuple((result, *(s for s in states if s is not None))), "results")
        if caches:
            joined = [self._join(cache) for cache in caches]
            result = frame.builder.emit(Tuple((result, *joined)), "results")
        return self._finish(frame, result)

    def _state(self, path: str, effect: Effect) -> tuple[Tensor, ...]:
        """Make the arguments that hold an effect's state."""
        function = self.initial_states([effect])
        types = [function.result_type.fields[i] for i in range(len(function.result_type.fields))]  # type: ignore[union-attr]
        return tuple(self.wrap(self.frame.builder.param(f"{path}.{i}", t, "input"), t) for i, t in enumerate(types))

    def initial_states(self, effects: Iterable[Effect]) -> Function:
        """Return the function that makes the first state of effects."""
        outer = getattr(self, "frame", None)
        self.frame = frame = Frame(FunctionBuilder("_initialize_effect", self.functions))
        token = active_mode.set(self)
        try:
            atoms = [self.atom(t, ops.where) for effect in effects for t in effect.init()]
            return frame.builder.finish(frame.builder.emit(Tuple(tuple(a for a in atoms if a is not None)), "state"))
        finally:
            active_mode.reset(token)
            if outer is not None:
                self.frame = outer

    def _argument(self, name: str, spec: specs.ArgumentSpec) -> Any:
        builder = self.frame.builder
        type_ = argument_type(name, spec)
        sized = type_ if not self.facts else with_facts_type(type_, self.facts)
        if isinstance(spec, specs.Object):
            return spec.object_type.traced(builder.param(name, sized, "input"))  # type: ignore[attr-defined]
        param = builder.param(name, sized, "state" if isinstance(spec, specs.Cache) else "input")
        value = self.wrap(param, sized)
        if isinstance(value, Cache):
            # A branch of op.cond must see every layer before it starts: the handles it writes come out of both branches.
            self.frame.layers.extend(value)
        return value

    def _join(self, cache: Cache) -> Var:
        return self.frame.builder.call(ops.cache_join, *[layer.handle for layer in cache])

    def _result(self, name: str, value: Any) -> Atom:
        """Return one atom for what the method returned."""
        builder = self.frame.builder
        if value is None:
            return builder.emit(Tuple(()), "none")
        if isinstance(value, (Cache, CacheLayer)):
            raise TraceError(
                f"{name} returns a cache",
                where=str(builder.place),
                help="return tensors only: the written cache is threaded by itself",
            )
        if isinstance(value, (list, tuple)):
            return builder.emit(Tuple(tuple(self._result(name, v) for v in value)), "results")
        if isinstance(value, dict) and all(isinstance(k, str) for k in value):
            return builder.emit(
                Tuple(tuple(self._result(name, v) for v in value.values()), tuple(value)), "results"
            )
        if isinstance(value, (Tensor, Object, Var)) or (
            isinstance(value, (Dim, int, float)) and value is not None
        ):
            atom = value if isinstance(value, Var) else self.atom(value, ops.where)
            assert atom is not None
            return atom
        raise TraceError(
            f"{name} returns a {type(value).__name__}",
            where=str(builder.place),
            help="return tensors, objects, dims, numbers, None, or tuples, lists and dicts of them",
        )

    def _finish(self, frame: Frame, result: Atom) -> Function:
        """Make the function; weights come after the inputs, in the order of the module's parameters."""
        order = {name: i for i, name in enumerate(self.tree.parameters)}
        frame.builder.params.sort(key=lambda p: order[p.name] if p.role == "weight" else -1)
        return frame.builder.finish(
            result, attrs={"derived": tuple(frame.derived)} if frame.derived else NO_ATTRS
        )


def trace(tree: Tree, spec: specs.ModuleSpec) -> IRModule:
    """Trace every method of `spec` into one module: private functions first, then the methods in the order of the spec.

    Raises TraceError, InferError or DimError with the module path, the method and the author's source line.
    """
    mode = Trace(tree, known_facts(spec, tree.parameters), spec.methods)
    methods = [mode.method_function(name, method) for name, method in spec.methods.items()]
    if any(method.effect_mode != "none" for method in spec.methods.values()) and tree.effects:
        methods.insert(0, mode.initial_states(tree.effects.values()))
    called = _called(methods, mode.functions)
    attrs: dict[str, Any] = {"aliases": dict(tree.aliases)} if tree.aliases else {}
    read = {param.name for method in methods for param in method.weights}
    unread = tuple(name for name in tree.parameters if name not in read)
    if unread:
        attrs["unread"] = unread
    return IRModule([*(f for name, f in mode.functions.items() if name in called), *methods], attrs)


def _called(methods: Sequence[Function], functions: Mapping[str, Function]) -> set[str]:
    """Names of the private functions that are reached: a trace that could not be shared leaves some behind."""
    called: set[str] = set()
    pending = list(methods)
    while pending:
        for expr in walk_exprs(pending.pop()):
            if isinstance(expr, FunctionCall) and expr.function not in called:
                called.add(expr.function)
                pending.append(functions[expr.function])
    return called


def _definition(method: Callable[..., Any]) -> Provenance:
    """Return where a method is defined."""
    code = inspect.unwrap(getattr(method, "__func__", method)).__code__
    return Provenance("", code.co_filename, code.co_firstlineno)


def constant(data: torch.Tensor) -> Constant:
    """Return the constant atom for a torch tensor."""
    dtype = str(data.dtype).removeprefix("torch.")
    flat = data.detach().cpu().contiguous().reshape(-1)
    return Constant(TensorType(tuple(data.shape), dtype), flat.view(torch.uint8).numpy().tobytes())


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Tensor, Object, torch.Tensor))
