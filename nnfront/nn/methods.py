# SPDX-License-Identifier: Apache-2.0
"""Trace methods: their arguments become parameters, what they return becomes the result, and all of them one IR module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nnfront import ops
from nnfront.dims import Dim, strict_comparisons
from nnfront.errors import NnfrontError, TraceError
from nnfront.ir import (
    NO_ATTRS,
    Atom,
    Function,
    FunctionBuilder,
    FunctionCall,
    IRModule,
    Provenance,
    Tuple,
    Var,
    to_plain,
    walk_exprs,
)
from nnfront.nn import spec as specs
from nnfront.nn.arguments import known_facts, with_facts_type
from nnfront.nn.cache import Cache, CacheLayer
from nnfront.nn.effect import Effect
from nnfront.nn.frame import Frame, Tree
from nnfront.nn.object import Object
from nnfront.nn.tensor import Tensor, active_mode
from nnfront.nn.trace import Trace


class MethodTrace(Trace):
    """A trace that makes functions of whole methods."""

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
            states = [
                self.atom(t, ops.where) for effect in threaded.values() for t in self.effects[id(effect)]
            ]
            result = frame.builder.emit(Tuple((result, *(s for s in states if s is not None))), "results")
        if caches:
            joined = [self._join(cache) for cache in caches]
            result = frame.builder.emit(Tuple((result, *joined)), "results")
        return self._finish(frame, result, spec)

    def _state(self, path: str, effect: Effect) -> tuple[Tensor, ...]:
        """Make the arguments that hold an effect's state."""
        function = self.initial_states([effect])
        types = [function.result_type.fields[i] for i in range(len(function.result_type.fields))]  # type: ignore[union-attr]
        return tuple(
            self.wrap(self.frame.builder.param(f"{path}.{i}", t, "input"), t) for i, t in enumerate(types)
        )

    def initial_states(self, effects: Iterable[Effect]) -> Function:
        """Return the function that makes the first state of effects."""
        outer = getattr(self, "frame", None)
        self.frame = frame = Frame(FunctionBuilder("_initialize_effect", self.functions))
        token = active_mode.set(self)
        try:
            atoms = [self.atom(t, ops.where) for effect in effects for t in effect.init()]
            return frame.builder.finish(
                frame.builder.emit(Tuple(tuple(a for a in atoms if a is not None)), "state")
            )
        finally:
            active_mode.reset(token)
            if outer is not None:
                self.frame = outer

    def _argument(self, name: str, spec: specs.ArgumentSpec) -> Any:
        builder = self.frame.builder
        type_ = specs.argument_type(name, spec)
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

    def _finish(self, frame: Frame, result: Atom, spec: specs.MethodSpec) -> Function:
        """Make the function; weights come after the inputs, in the order of the module's parameters."""
        order = {name: i for i, name in enumerate(self.tree.parameters)}
        frame.builder.params.sort(key=lambda p: order[p.name] if p.role == "weight" else -1)
        attrs: dict[str, Any] = {"derived": tuple(frame.derived)} if frame.derived else {}
        if spec.special_cases:
            attrs["special_cases"] = tuple(to_plain(case) for case in spec.special_cases)
        return frame.builder.finish(result, attrs=attrs or NO_ATTRS)


def trace(tree: Tree, spec: specs.ModuleSpec) -> IRModule:
    """Trace every method of `spec` into one module: private functions first, then the methods in the order of the spec.

    Raises TraceError, InferError or DimError with the module path, the method and the author's source line.
    """
    mode = MethodTrace(tree, known_facts(spec, tree.parameters), spec.methods)
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
