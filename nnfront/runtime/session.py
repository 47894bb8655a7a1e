# SPDX-License-Identifier: Apache-2.0
"""`Session`: methods with their weights, ready to be called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from nnfront.dims import Symbol
from nnfront.errors import RunError
from nnfront.lower import CacheType, MethodProgram, Program
from nnfront.runtime.cache import Cache, cache_sizes, describe, layout, make_cache
from nnfront.runtime.check import compile_check
from nnfront.runtime.cpu import resolve
from nnfront.runtime.execute import execute, prepare
from nnfront.runtime.loading import Values, learn_dims, loaded_frame, matched_dims
from nnfront.runtime.results import result_maker, split_results
from nnfront.runtime.signature import Known, arrange


class Method:
    """A method with its weights. Call it with torch tensors; it may run in several threads at once."""

    def __init__(self, program: MethodProgram, weights: Values, known: Known) -> None:
        """`known` are the dims that weights bind, those of this method and of others."""
        self.program = program
        self.name = program.name
        self._template = loaded_frame(program, weights, known)
        self._check = compile_check(program, known)
        dims = {b.symbol: b.slot for b in program.dims} | matched_dims(program)
        first, last = split_results(program.body)
        self._code = prepare(first, program.slots, resolve, dims, self.name)
        self._last = prepare(last, program.slots, resolve, dims, self.name)
        with torch.inference_mode():
            execute(prepare(program.setup, program.slots, resolve, dims, self.name), self._template)
        self._result = result_maker(program, self._template)
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
                execute(self._code, frame)
            with torch.no_grad():
                execute(self._last, frame)
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
        dims: Mapping[Symbol, int] | None = None,
    ) -> None:
        """`weights` are the raw ones by name, `transformed` the results of each transform by its name and theirs.

        `dims` are sizes that weights have said which are not among these. Raises LoadError for weights that do not fit.
        """
        self.program = program
        results = transformed or {}
        values: dict[str, Values] = {
            name: {"weight": weights, "transformed": results.get(method.transform or "", {})}
            for name, method in program.methods.items()
        }
        self._known: Known = {symbol: (number, "the weights") for symbol, number in (dims or {}).items()}
        for name, method in program.methods.items():
            learn_dims(self._known, method, values[name])
        self._methods = {name: Method(m, values[name], self._known) for name, m in program.methods.items()}
        prefixed = len(results) > 1
        named = {f"{t}.{n}" if prefixed else n: v for t, found in results.items() for n, v in found.items()}
        self.weights: Mapping[str, Any] = MappingProxyType({**weights, **named})

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
        return make_cache(type, cache_sizes(type, sizes, known))
