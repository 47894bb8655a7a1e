# SPDX-License-Identifier: Apache-2.0
"""`Session`: methods with their weights, ready to be called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from nnfront.dims import Dim, Size, Symbol, describe_facts, satisfies
from nnfront.errors import LoadError, RunError
from nnfront.lower import (
    Argument,
    Block,
    CacheType,
    Instruction,
    Match,
    MethodProgram,
    Place,
    Program,
    Run,
    Structure,
    TensorType,
    type_text,
)
from nnfront.runtime.cache import Cache, describe, layout, make_cache
from nnfront.runtime.check import compile_check, put
from nnfront.runtime.cpu import resolve
from nnfront.runtime.execute import Frame, execute, initial_frame, prepare
from nnfront.runtime.signature import Known, arrange, observed
from nnfront.runtime.signature import resolve as resolve_dims

# Weights by role (`weight`, `transformed`) and name.
Values: TypeAlias = Mapping[str, Mapping[str, Any]]


class Method:
    """A method with its weights. Call it with torch tensors; it may run in several threads at once."""

    def __init__(self, program: MethodProgram, weights: Values, known: Known) -> None:
        """`known` are the dims that weights bind, those of this method and of others."""
        self.program = program
        self.name = program.name
        self._template = _loaded_frame(program, weights, known)
        self._check = compile_check(program, known)
        dims = {b.symbol: b.slot for b in program.dims} | _matched_dims(program)
        first, last = _split_results(program.body)
        self._code = prepare(first, program.slots, resolve, dims, self.name)
        self._last = prepare(last, program.slots, resolve, dims, self.name)
        with torch.inference_mode():
            execute(prepare(program.setup, program.slots, resolve, dims, self.name), self._template)
        self._result = _result_maker(program, self._template)
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
            _learn(self._known, method, values[name])
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


def _learn(known: Known, program: MethodProgram, weights: Values) -> None:
    """Add the dims that a method's weights bind to those known. Raises LoadError for a size that contradicts another."""
    found: list[tuple[Place, Size, int]] = []
    for argument in program.weights:
        values = weights[argument.role]
        if argument.name not in values:
            raise LoadError(f"{program.name}: {argument.role} {argument.name!r} has no value")
        _check_kind(program, argument, values[argument.name])
        found += observed(argument, values[argument.name])
    bindings = [b for b in program.dims if b.place.is_weight and b.symbol not in known]
    try:
        bound = resolve_dims(f"{program.name}: weight", found, bindings, dict(known))
    except RunError as error:
        raise LoadError(error.what, details=error.details) from None
    known.update((b.symbol, (bound[b.symbol][0], f"weight {b.place}")) for b in bindings)


def _loaded_frame(program: MethodProgram, weights: Values, known: Known) -> Frame:
    """Return a frame with constants, weights and their dims in place."""
    frame = initial_frame(program.slots)
    for argument in program.weights:
        put(frame, argument.structure, weights[argument.role][argument.name])
    for binding in program.dims:
        if binding.symbol in known:
            frame[binding.slot] = known[binding.symbol][0]
    return frame


def _check_kind(program: MethodProgram, weight: Argument, value: Any) -> None:
    """Raise LoadError for a tensor of another dtype or rank."""
    if isinstance(weight.type, TensorType) and isinstance(value, torch.Tensor):
        got = f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
        if value.ndim != weight.type.ndim or got.partition("[")[0] != weight.type.dtype:
            what = (
                f"{program.name}: {weight.role} {weight.name!r} is {got}, expected {type_text(weight.type)}"
            )
            raise LoadError(what)


def _matched_dims(program: MethodProgram) -> dict[Symbol, int]:
    """The slots of the dims that a method defines while it runs."""
    return {symbol: slot for i in program.body.walk() if isinstance(i, Match) for symbol, slot in i.defines}


def _split_results(body: Block) -> tuple[Block, Block]:
    """Split off the instructions at the end whose results the caller gets.

    Nobody may write to a tensor that was made in inference mode, and a caller may want to. So these run outside of it.
    """
    count, results = len(body.instructions), set(body.results)
    while count and _gives(body.instructions[count - 1], results):
        count -= 1
    return Block(body.instructions[:count], (), body.sizes), Block(body.instructions[count:])


def _gives(instruction: Instruction, results: set[int]) -> bool:
    """Whether an instruction does nothing but compute results."""
    return (
        isinstance(instruction, Run) and instruction.is_pure and not results.isdisjoint(instruction.outputs)
    )


def _result_maker(program: MethodProgram, template: Frame) -> Callable[[Frame], Any]:
    """Compile what puts a method's result together, from tensors that the caller may write to.

    What was made in inference mode, and what shares memory with something that the session holds, is copied.
    """
    held = {value.untyped_storage().data_ptr() for value in template if isinstance(value, torch.Tensor)}

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_shared = value.is_inference() or value.untyped_storage().data_ptr() in held
        return value.clone() if is_shared else value

    def source(structure: Structure) -> str:
        if structure.is_leaf:
            return f"own(frame[{structure.slot}])"
        parts = [source(part) for part in structure.fields]
        if structure.names is not None:
            return "{" + ", ".join(f"{n!r}: {p}" for n, p in zip(structure.names, parts, strict=True)) + "}"
        return f"({''.join(f'{part}, ' for part in parts)})"

    scope: dict[str, Any] = {"own": own}
    exec(f"def result(frame):\n return {source(program.result)}", scope)
    made: Callable[[Frame], Any] = scope["result"]
    return made
