# SPDX-License-Identifier: Apache-2.0
"""Trace methods: their arguments become parameters, what they return becomes the result, and all of them one IR module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from nnfront import ops
from nnfront.cases.conditions import to_plain
from nnfront.dims import Dim, Symbol, strict_comparisons
from nnfront.errors import TraceError
from nnfront.holding import holding
from nnfront.ir import (
    NO_ATTRS,
    Atom,
    Function,
    FunctionBuilder,
    IRModule,
    Provenance,
    Tuple,
    Var,
    reached,
    walk_bindings,
)
from nnfront.nn import spec as specs
from nnfront.nn.cache import Cache, CacheLayer
from nnfront.nn.dim_facts import known_facts, with_facts_type
from nnfront.nn.effect import Effect
from nnfront.nn.loop import trace_scan
from nnfront.nn.mode import active_mode
from nnfront.nn.opaque import Object
from nnfront.nn.shared_layers import Subroutines
from nnfront.nn.tensor import Tensor
from nnfront.nn.trace import Trace
from nnfront.nn.trace_state import Frame, Tree


class MethodTrace(Trace):
    """A trace that makes functions of whole methods, and private ones of what is in them."""

    def __init__(self, tree: Tree, facts: Mapping[Symbol, Symbol], reserved: Iterable[str] = ()) -> None:
        super().__init__(tree, facts, reserved)
        self.subroutines = Subroutines(self)

    def method_function(self, name: str, spec: specs.MethodSpec) -> Function:
        """Trace one method."""
        self.method, self.path = name, ""
        self.frame = frame = Frame(FunctionBuilder(name, self.functions))
        frame.builder.place = definition = _definition(spec.method)
        arguments = {key: self._argument(key, value) for key, value in spec.arguments.items()}
        caches = [value for value in arguments.values() if isinstance(value, Cache)]
        threaded = self.tree.effects if spec.effect_mode != "none" else {}
        self.effects = {id(effect): self._state(path, effect) for path, effect in threaded.items()}
        with self._active(definition):
            with strict_comparisons():
                value = spec.method(**arguments)
            if spec.param_mode == "none" and frame.weights:
                names = [w.name for w in frame.builder.params if w.role == "weight"]
                raise TraceError(
                    f"{name}: param_mode is 'none', but the method reads {', '.join(map(repr, names[:3]))}"
                )
            frame.builder.place = definition
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

    def scan(self, body: Callable[[Any, Any], Any], carry: Any, xs: Any, axis: int) -> tuple[Any, Any]:
        """Trace the body of a loop into a private function and emit the loop."""
        return trace_scan(self, body, carry, xs, axis)

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module's forward. One that occurs many times is traced once, into a private function that is called from then on (`shared_layers`)."""
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
        except Exception as error:
            self.explain(error)
            raise
        finally:
            self.path = outer

    def _state(self, path: str, effect: Effect) -> tuple[Tensor, ...]:
        """Make the arguments that hold an effect's state."""
        function = self.initial_states([effect])
        types = [function.result_type.fields[i] for i in range(len(function.result_type.fields))]  # type: ignore[union-attr]
        return tuple(
            self.wrap(self.frame.builder.param(f"{path}.{i}", t, "input"), t) for i, t in enumerate(types)
        )

    def initial_states(self, effects: Iterable[Effect]) -> Function:
        """Return the function that makes the first state of effects."""
        outer, method = getattr(self, "frame", None), self.method
        self.method = "_initialize_effect"
        self.frame = frame = Frame(FunctionBuilder(self.method, self.functions))
        try:
            with self._active():
                atoms = [self.atom(t, ops.where) for effect in effects for t in effect.init()]
            return frame.builder.finish(
                frame.builder.emit(Tuple(tuple(a for a in atoms if a is not None)), "state")
            )
        finally:
            self.method = method
            if outer is not None:
                self.frame = outer

    @contextmanager
    def _active(self, definition: Provenance | None = None) -> Iterator[None]:
        """Trace what is called inside; errors get their place."""
        with holding(active_mode, self):
            try:
                yield
            except Exception as error:
                self.explain(error, definition)
                raise

    def _argument(self, name: str, spec: specs.ArgumentSpec) -> Any:
        builder = self.frame.builder
        type_ = specs.argument_type(name, spec)
        sized = type_ if not self.facts else with_facts_type(type_, self.facts)
        param = builder.param(name, sized, "state" if isinstance(spec, specs.State) else "input")
        value = self.wrap(param, sized, _kind(spec))
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
        kind, is_array = type(value), isinstance(value, (torch.Tensor, np.ndarray))
        raise TraceError(
            f"{name} returns a {f'{kind.__module__}.' if is_array else ''}{kind.__name__}",
            help="nnfront.Tensor.from_const makes a tensor of it"
            if is_array
            else "return tensors, objects, dims, numbers, None, or tuples, lists and dicts of them",
        )

    def _finish(self, frame: Frame, result: Atom, spec: specs.MethodSpec) -> Function:
        """Make the function; weights come after the inputs, in the order of the module's parameters."""
        order = {name: i for i, name in enumerate(self.tree.parameters)}
        frame.builder.params.sort(key=lambda p: order[p.name] if p.role == "weight" else -1)
        attrs: dict[str, Any] = {"derived": tuple(frame.derived)} if frame.derived else {}
        if spec.special_cases:
            attrs["special_cases"] = tuple(to_plain(case) for case in spec.special_cases)
        return frame.builder.finish(result, attrs=attrs or NO_ATTRS)


def _kind(spec: specs.ArgumentSpec) -> Any:
    """Return the class of an opaque argument, for a tuple one for each element."""
    if isinstance(spec, specs.Tuple):
        return tuple(map(_kind, spec.elements))
    return spec.object_type if isinstance(spec, specs.Object) else Object


def trace(tree: Tree, spec: specs.ModuleSpec) -> IRModule:
    """Trace every method of `spec` into one module: private functions first, then the methods in the order of the spec.

    Raises TraceError, InferError or DimError with the module path, the method and the author's source line.
    """
    mode = MethodTrace(tree, known_facts(spec, tree.parameters), spec.methods)
    methods = [mode.method_function(name, method) for name, method in spec.methods.items()]
    if any(method.effect_mode != "none" for method in spec.methods.values()) and tree.effects:
        methods.insert(0, mode.initial_states(tree.effects.values()))
    called = reached(mode.functions, methods)  # a trace that could not be shared leaves others behind
    attrs: dict[str, Any] = {"aliases": dict(tree.aliases)} if tree.aliases else {}
    read = {param.name for method in methods for param in method.weights}
    unread = tuple(name for name in tree.parameters if name not in read)
    if unread:
        attrs["unread"] = unread
    return IRModule([*(f for name, f in mode.functions.items() if name in called), *methods], attrs)


def refuse_additions(
    before: Iterable[tuple[str, Any]], after: Iterable[tuple[str, Any]], module: IRModule
) -> None:
    """Refuse what methods have put into lists and dicts of the tree, whose (path, item) these are, while they were traced."""
    known = {(path, id(item)) for path, item in before}
    added = next(((path, item) for path, item in after if (path, id(item)) not in known), None)
    if added is None:
        return
    path, item = added
    bindings = (binding for function in module.values() for binding in walk_bindings(function.bindings))
    made = next((b.provenance for b in bindings if isinstance(item, Tensor) and b.var is item.content), None)
    raise TraceError(
        f"{path!r} keeps {item!r}, which was put there while the methods were traced",
        where=str(made or ""),
        help="export leaves a module as it was: return the value, or compute it in __init__",
    )


def _definition(method: Callable[..., Any]) -> Provenance:
    """Return where a method is defined."""
    code = inspect.unwrap(getattr(method, "__func__", method)).__code__
    return Provenance("", code.co_filename, code.co_firstlineno)
