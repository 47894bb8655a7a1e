# SPDX-License-Identifier: Apache-2.0
"""`Session`: methods with their weights, ready to be called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from nnfront.dims import Dim, Size, Symbol, describe_facts, satisfies
from nnfront.errors import LoadError, RunError
from nnfront.lower import CacheType, Match, MethodProgram, Place, Program, Run, Structure, TensorType
from nnfront.runtime.cache import Cache, describe, layout, make_cache
from nnfront.runtime.check import compile_check, put
from nnfront.runtime.cpu import resolve
from nnfront.runtime.execute import Code, Frame, execute, initial_frame, prepare
from nnfront.runtime.signature import Known, arrange, observed
from nnfront.runtime.signature import resolve as resolve_dims


class Method:
    """A method with its weights. Call it with torch tensors; it may run in several threads at once."""

    def __init__(self, program: MethodProgram, weights: Mapping[str, Mapping[str, Any]]) -> None:
        """`weights` gives values by role (`weight`, `transformed`) and name."""
        self.program = program
        self.name = program.name
        frame, self.known = _loaded_frame(program, weights)
        self._template: Frame = frame
        self._check = compile_check(program, self.known)
        dims = {b.symbol: b.slot for b in program.dims} | _matched_dims(program)
        self._code: Code = prepare(program.body, program.slots, resolve, dims)
        with torch.inference_mode():
            execute(prepare(program.setup, program.slots, resolve, dims), frame, self.name)
        self._result = _result_maker(program)
        self._count = len(program.arguments)
        self._states = [i for i, a in enumerate(program.arguments) if a.role == "state"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it: arguments by position, in the order of the signature, or by name.

        Returns torch tensors, or tuples and dicts of them, as the model's method does. States (caches) are written in place.
        Raises RunError, before anything runs, if the arguments do not fit the signature.
        """
        frame = self._template.copy()
        if kwargs or len(args) != self._count:
            args = tuple(arrange(self.program, args, kwargs))
        self._check(frame, args)
        marks = [args[i].mark() for i in self._states]
        try:
            with torch.inference_mode():
                execute(self._code, frame, self.name)
                return self._result(frame)
        except BaseException:
            for i, mark in zip(self._states, marks, strict=True):
                args[i].restore(mark)
            raise

    def __repr__(self) -> str:
        return f"<Method {self.name}({', '.join(a.name for a in self.program.arguments)})>"


class Session(Mapping[str, Method]):
    """The methods of a program by name, over one set of weights that nobody changes."""

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Any],
        transformed: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`weights` are the raw ones by name, `transformed` the results of each transform by its name and theirs."""
        self.program = program
        results = transformed or {}
        self._methods = {
            name: Method(method, {"weight": weights, "transformed": results.get(method.transform or "", {})})
            for name, method in program.methods.items()
        }
        prefixed = len(results) > 1
        named = {f"{t}.{n}" if prefixed else n: v for t, values in results.items() for n, v in values.items()}
        self.weights: Mapping[str, Any] = MappingProxyType({**weights, **named})
        self._known: Known = {s: k for method in self._methods.values() for s, k in method.known.items()}

    def __getitem__(self, name: str) -> Method:
        method = self._methods.get(name)
        if method is None:
            raise RunError(
                f"there is no method {name!r}",
                help=f"methods are {', '.join(map(repr, self._methods)) or 'none'}",
            )
        return method

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods."""
        return tuple(self._methods)

    def make_cache(self, **sizes: int) -> Cache:
        """Make an empty cache for the methods of this session; `sizes` are its dims by name: `make_cache(batch=1, max_seq=4096)`.

        Raises RunError for a dim that is missing, unknown or outside its range, and if no method takes a cache.
        """
        types = {
            a.type: None
            for m in self.program.methods.values()
            for a in m.arguments
            if isinstance(a.type, CacheType)
        }
        if not types:
            raise RunError("no method takes a cache")
        if len({layout(type) for type in types}) > 1:
            raise RunError(
                "the methods take different caches", details=[describe(layout(type)) for type in types]
            )
        type = next(iter(types))
        known = {symbol.name: number for symbol, (number, _) in self._known.items()}
        return make_cache(type, _cache_sizes(type, sizes, known))


def _cache_sizes(cache: CacheType, given: Mapping[str, int], known: Mapping[str, int]) -> dict[str, int]:
    """Check the dims of a cache: all that the weights do not bind, each inside its range."""
    symbols = {
        s.name: s
        for layer in cache.layers
        for size in (layer.batch, layer.max_seq)
        if isinstance(size, Dim)
        for s in size.symbols
    }
    needed = [name for name in symbols if name not in known]
    missing = [name for name in needed if name not in given]
    if missing:
        raise RunError(
            f"make_cache needs {', '.join(repr(n) for n in missing)}",
            help=f"make_cache({', '.join(f'{n}=...' for n in needed)})",
        )
    for name, number in given.items():
        if name not in needed:
            raise RunError(
                f"make_cache: {name!r} is not a dim of the cache",
                help=f"make_cache({', '.join(f'{n}=...' for n in needed)})",
            )
        if type(number) is not int or satisfies(number, symbols[name]) is False:
            raise RunError(
                f"make_cache: {name!r} is {number!r}, expected {describe_facts(*symbols[name].facts)}"
            )
    return {**known, **given}


def _loaded_frame(program: MethodProgram, weights: Mapping[str, Mapping[str, Any]]) -> tuple[Frame, Known]:
    """Return a frame with constants and weights in place, and the dims that the weights bind.

    Raises LoadError for a weight that is missing, or whose sizes contradict another's.
    """
    frame = initial_frame(program.slots)
    found: list[tuple[Place, Size, int]] = []
    for argument in program.weights:
        values = weights[argument.role]
        if argument.name not in values:
            raise LoadError(f"{program.name}: {argument.role} {argument.name!r} has no value")
        put(frame, argument.structure, values[argument.name])
        found += observed(argument, values[argument.name])
    bindings = [b for b in program.dims if b.place.is_weight]
    try:
        known = resolve_dims(f"{program.name}: weight", found, bindings, {})
    except RunError as error:
        raise LoadError(error.what, details=error.details) from None
    for binding in bindings:
        frame[binding.slot] = known[binding.symbol][0]
    return frame, {symbol: (number, f"weight {place}") for symbol, (number, place) in known.items()}


def _matched_dims(program: MethodProgram) -> dict[Symbol, int]:
    """The slots of the dims that a method defines while it runs."""
    return {symbol: slot for i in program.body.walk() if isinstance(i, Match) for symbol, slot in i.defines}


def _result_maker(program: MethodProgram) -> Callable[[Frame], Any]:
    """Compile what puts a method's result together. What the session itself holds is copied, as the caller may write to it."""
    own = {o for i in program.setup.instructions if isinstance(i, Run) for o in i.outputs}
    own |= {
        i
        for i, slot in enumerate(program.slots)
        if slot.kind in ("weight", "constant") and isinstance(slot.type, TensorType)
    }

    def source(structure: Structure) -> str:
        if structure.is_leaf:
            return f"frame[{structure.slot}]" + (".clone()" if structure.slot in own else "")
        parts = [source(part) for part in structure.fields]
        if structure.names is not None:
            return "{" + ", ".join(f"{n!r}: {p}" for n, p in zip(structure.names, parts, strict=True)) + "}"
        return f"({''.join(f'{part}, ' for part in parts)})"

    scope: dict[str, Any] = {}
    exec(f"def result(frame):\n return {source(program.result)}", scope)
    made: Callable[[Frame], Any] = scope["result"]
    return made
