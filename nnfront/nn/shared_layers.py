# SPDX-License-Identifier: Apache-2.0
"""Trace a module that occurs many times once, into a private function, and call that for all that agree with it.

The function's parameters are the arguments, then the weights that its body read: derived tensors are emitted where it is
called and passed in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from nnfront import ops
from nnfront.dims import Symbol, of_symbol
from nnfront.ir import (
    Atom,
    FunctionBuilder,
    FunctionCall,
    Projection,
    Scalar,
    ScalarType,
    Tuple,
    TupleType,
    undefined_symbols,
)
from nnfront.nn.cache import CacheLayer
from nnfront.nn.layer_equivalence import (
    CannotShare,
    ReadLog,
    current_recorder,
    start_recording,
    static_key,
    stop_recording,
)
from nnfront.nn.opaque import Object, kind_of
from nnfront.nn.pytree import flatten, unflatten
from nnfront.nn.tensor import Tensor
from nnfront.nn.trace import Trace
from nnfront.nn.trace_state import Frame

# Different bodies kept for one class and one set of argument types; beyond it modules are traced in place, so that a model
# in which every layer differs is not compared layer by layer.
_MAX_VARIANTS = 8


@dataclass(frozen=True)
class Subroutine:
    """A private function that stands for a module's forward, and what another module must agree in to call it.

    `slots` say which of the weights that were read are its parameters; `dims` are those that no parameter's type defines.
    """

    function: str
    reads: ReadLog
    slots: tuple[int, ...]
    dims: tuple[Symbol, ...]
    structure: Any
    kinds: tuple[type[Object], ...]  # one for each result


class Subroutines:
    """The shared bodies of one trace, by class and argument types."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.known: dict[Any, list[Subroutine | None]] = {}

    def call(self, module: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Call `module` through the private function of one that agrees with it; (False, None) where that cannot be."""
        structure, leaves = flatten((args, kwargs), _is_argument)
        try:
            types = tuple((leaf.type, kind_of(leaf)) for leaf in leaves)
            key = (type(module), static_key(structure), types)
        except CannotShare:
            return False, None
        known = self.known.setdefault(key, [])
        for subroutine in known:
            if subroutine is None:
                return False, None
            tensors = subroutine.reads.match(module)
            if tensors is not None:
                return True, self._emit_call(subroutine, leaves, tensors)
        if len(known) == _MAX_VARIANTS:
            return False, None
        try:
            names = _leaf_names(module.forward, args, kwargs)
            subroutine = self._trace_shared(module, path, structure, leaves, names)
        except CannotShare:
            known.append(None)
            return False, None
        known.append(subroutine)
        return True, self._emit_call(subroutine, leaves, subroutine.reads.tensors)

    def _trace_shared(
        self, module: Any, path: str, structure: Any, leaves: list[Any], names: list[str]
    ) -> Subroutine:
        """Trace `module` into a private function of its own."""
        outer_frame, outer_path = self.trace.frame, self.trace.path
        name = self.trace.function_names.unique(type(module).__name__)
        frame = Frame(FunctionBuilder(name, self.trace.functions), parent=outer_frame, prefix=path)
        reads = ReadLog(module, current_recorder())
        effects = dict(self.trace.effects)
        token = start_recording(reads)
        self.trace.frame, self.trace.path = frame, ""
        try:
            inside = [self._inner_argument(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
            args, kwargs = unflatten(structure, inside)
            result_structure, result_leaves = flatten(module.forward(*args, **kwargs), _is_argument)
            static_key(result_structure)
            result = self._shared_result(result_leaves)
            changed = self.trace.changes_effects(effects)
        finally:
            stop_recording(token)
            self.trace.frame, self.trace.path = outer_frame, outer_path
            self.trace.effects = effects
        slots = {id(t): i for i, t in enumerate(reads.tensors)}
        if changed or reads.failed or any(id(t) not in slots for t in frame.reads):
            raise CannotShare
        function = frame.builder.finish(result, "private")
        dims = undefined_symbols(function)
        if dims is None:
            raise CannotShare
        for symbol in dims:
            frame.builder.param(symbol.name, ScalarType("int64", of_symbol(symbol)), "input")
        self.trace.functions[name] = frame.builder.finish(result, "private")
        return Subroutine(
            name,
            reads,
            tuple(slots[id(t)] for t in frame.reads),
            tuple(dims),
            result_structure,
            tuple(map(kind_of, result_leaves)),
        )

    def _inner_argument(self, leaf: Any, name: str) -> Any:
        """Return what stands for an argument inside a shared body."""
        builder = self.trace.frame.builder
        if isinstance(leaf, CacheLayer):
            layer = CacheLayer(leaf.type, builder.param(name, leaf.type, "state"))
            self.trace.frame.layers.append(layer)
            return layer
        return self.trace.wrap(builder.param(name, leaf.type, "input"), leaf.type, kind_of(leaf))

    def _shared_result(self, leaves: list[Any]) -> Atom:
        """Return the result of a shared body: its leaves as one value, then the written handles."""
        builder, layers = self.trace.frame.builder, self.trace.frame.layers
        atoms = []
        for leaf in leaves:
            atom = self.trace.atom(leaf, ops.where)
            if atom is None or isinstance(leaf, CacheLayer):
                raise CannotShare
            atoms.append(atom)
        result = atoms[0] if len(atoms) == 1 else builder.emit(Tuple(tuple(atoms)), "results")
        if layers:
            result = builder.emit(Tuple((result, *[layer.handle for layer in layers])), "results")
        return result

    def _emit_call(self, subroutine: Subroutine, leaves: list[Any], tensors: Sequence[Tensor]) -> Any:
        """Emit a call of a shared body and return what the module returned."""
        builder = self.trace.frame.builder
        layers = [leaf for leaf in leaves if isinstance(leaf, CacheLayer)]
        args = [self.trace.atom(leaf, ops.where) for leaf in leaves]
        args += [self.trace.weight(tensors[slot]) for slot in subroutine.slots]
        args += [Scalar(of_symbol(symbol)) for symbol in subroutine.dims]
        function = self.trace.functions[subroutine.function]
        call = FunctionCall(function.name, tuple(args))  # type: ignore[arg-type]
        # Everything that the first trace read has the same type here, so the result has too.
        var = builder.emit(call, function.name, self.trace.provenance(), function.result_type)
        if layers:
            assert isinstance(var.type, TupleType)
            for i, layer in enumerate(layers, 1):
                layer.handle = builder.emit(Projection(var, i), "cache", None, var.type.fields[i])
            var = builder.emit(Projection(var, 0), var.name, None, var.type.fields[0])
        kinds = subroutine.kinds
        if len(kinds) == 1:
            return unflatten(subroutine.structure, [self.trace.wrap(var, var.type, kinds[0])])
        results = self.trace.results(var, var.type, [], kinds) or ()
        return unflatten(subroutine.structure, results)


def _is_argument(value: Any) -> bool:
    return isinstance(value, (Tensor, Object, CacheLayer))


def _leaf_names(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return a name for each leaf of the arguments: that of the argument in which it stands."""
    signature = [
        p.name for p in inspect.signature(forward).parameters.values() if p.kind is not p.VAR_POSITIONAL
    ]
    names: list[str] = []
    for i, (name, value) in enumerate(
        [*((n, a) for n, a in zip_longest(signature[: len(args)], args)), *kwargs.items()]
    ):
        names += [name or f"arg_{i}"] * len(flatten(value, _is_argument)[1])
    return names
