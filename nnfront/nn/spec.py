# SPDX-License-Identifier: Apache-2.0
"""What a method is called with: `Tensor`, `Int`, `Object`, `Tuple`, `Cache`, `State` with its `Layer`s, and the specs of methods and modules.

A raw spec is a dict of dicts, read by `ModuleSpec.from_raw` without changing it:

    {"prefill": {"tokens": spec.Tensor(["batch", "seq"], "int64"), "n": int, "cache": spec.Cache(...)}}

The key `"$"` of a method may hold `param_mode` and `effect_mode` (`plain`, `packed` or `none`), and `special_cases`: a list of
cases for which the compiled method gets variants, in order (see `nnfront.cases.conditions`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

from nnfront.cases.conditions import Case, Conditions, read_case
from nnfront.cases.coverage import refuse_unreachable
from nnfront.dims import Dim, Symbol, merge_facts
from nnfront.errors import DimError, NnfrontError, PassError, SpecError, nearest
from nnfront.ir import (
    ScalarType,
    TensorType,
    TupleType,
    Type,
    sizes_of,
)
from nnfront.nn.state_spec import KV, Cache, Layer, State, Tensor

__all__ = [
    "KV",
    "Cache",
    "Int",
    "Layer",
    "MethodSpec",
    "ModuleSpec",
    "Object",
    "State",
    "Tensor",
    "Tuple",
    "argument_type",
    "convert",
]

Mode: TypeAlias = Literal["plain", "packed", "none"]


@dataclass(frozen=True)
class Int:
    """An integer argument. Inside the method it is a dim with the argument's name, so it may be used in shapes."""


@dataclass(frozen=True)
class Object:
    """An opaque argument of a class derived from `nn.Object`, which only external functions look into."""

    object_type: type


class Tuple:
    """A tuple or list argument; `name` is only for messages."""

    def __init__(self, name: str, elements: Sequence[Any]) -> None:
        self.name = name
        self.elements: tuple[ArgumentSpec, ...] = tuple(
            convert(e, f"{name}[{i}]") for i, e in enumerate(elements)
        )

    def __repr__(self) -> str:
        return f"Tuple({self.name!r}, {list(self.elements)})"


ArgumentSpec: TypeAlias = Tensor | Int | Object | Tuple | State


def convert(raw: Any, name: str) -> ArgumentSpec:
    """Turn one raw argument spec into its object.

    `int` and `"int"` stand for Int(), a list or tuple for Tuple, a class for Object. Raises SpecError for anything else.
    """
    if isinstance(raw, (Tensor, Int, Object, Tuple, State)):
        return raw
    if raw is Int or raw is int or raw == "int":
        return Int()
    if isinstance(raw, (list, tuple)):
        return Tuple(name, raw)
    if isinstance(raw, type) and raw not in (Tensor, Object, Tuple, Cache, State, Layer, str, float, bool):
        return Object(raw)
    shown = repr(raw)
    raise SpecError(
        f"{name!r} has the spec {shown if len(shown) < 60 else f'a {type(raw).__name__}'}, which is none",
        help="use spec.Tensor(shape, dtype), spec.Int(), spec.Object(cls), spec.Tuple(name, specs), spec.Cache(...) or spec.State(layers)",
    )


def argument_type(name: str, spec: ArgumentSpec) -> Type:
    """Return the IR type of an argument."""
    match spec:
        case Tensor():
            return TensorType(spec.shape, spec.dtype)
        case Int():
            return ScalarType("int64", Dim(name))
        case Object():
            object_type = getattr(spec.object_type, "object_type", None)
            if object_type is None:
                raise SpecError(
                    f"{name!r}: {spec.object_type.__name__} is not derived from nnfront.Object",
                    help="spec.Int() is a number; an opaque value has a class that is derived from nnfront.Object",
                )
            made: Type = object_type()
            return made
        case Tuple():
            return TupleType(tuple(argument_type(f"{name}_{i}", e) for i, e in enumerate(spec.elements)))
        case State():
            return spec.type


@dataclass(frozen=True)
class MethodSpec:
    """One method: its function, and the spec of each argument in the order of its signature."""

    method: Callable[..., Any]
    arguments: Mapping[str, ArgumentSpec]
    param_mode: Mode = "plain"
    effect_mode: Mode = "plain"
    special_cases: tuple[Conditions, ...] = ()

    @property
    def arg_names(self) -> list[str]:
        """Names of the arguments, in order."""
        return list(self.arguments)

    @property
    def arg_specs(self) -> list[ArgumentSpec]:
        """Specs of the arguments, in order."""
        return list(self.arguments.values())

    @staticmethod
    def from_raw(
        raw: Any, method: Callable[..., Any], dims: Callable[[], Iterable[Symbol]] = tuple
    ) -> MethodSpec:
        """Read the raw spec of one method against its Python signature; `dims` finds those of the module's parameters.

        Raises SpecError that lists every unknown, missing and ill-typed entry at once.
        """
        if isinstance(raw, MethodSpec):
            return raw
        if not isinstance(raw, Mapping):
            raise SpecError(f"the spec is {raw!r}, not a dict from argument names to specs")
        problems: list[str] = []
        signature = inspect.signature(method)
        more = raw.get("$", {})
        modes = _modes(more, problems)
        given = {key: value for key, value in raw.items() if key != "$"}
        arguments: dict[str, ArgumentSpec] = {}
        by_keyword = [
            p.name
            for p in signature.parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        for name in by_keyword:
            if name in given:
                try:
                    arguments[name] = convert(given[name], name)
                except NnfrontError as error:
                    problems.append("; ".join(filter(None, (error.what, error.help))))
            elif signature.parameters[name].default is inspect.Parameter.empty:
                problems.append(f"{name!r} is missing")
        for name in given:
            if name not in by_keyword:
                near = nearest(name, by_keyword)
                problems.append(f"{name!r} is not an argument{'; ' if near else ''}{near}")
        cases = more.get("special_cases", ()) if isinstance(more, Mapping) else ()
        declared = _special_cases(cases, method.__name__, arguments, dims, problems)
        if problems:
            raise SpecError(
                "the spec does not fit the method", details=[*problems, f"signature: {signature}"]
            )
        return MethodSpec(method, arguments, *modes, declared)


def _modes(raw: Any, problems: list[str]) -> tuple[Mode, Mode]:
    if not isinstance(raw, Mapping):
        problems.append(f"'$' is {raw!r}, not a dict")
        return "plain", "plain"
    for key in raw:
        if key not in ("param_mode", "effect_mode", "special_cases"):
            problems.append(f"'$' has the unknown key {key!r}")
    modes = []
    for key in ("param_mode", "effect_mode"):
        mode = raw.get(key, "plain")
        if mode not in get_args(Mode):
            problems.append(f"'$' {key!r} is {mode!r}, not one of {', '.join(map(repr, get_args(Mode)))}")
        modes.append(mode)
    return modes[0], modes[1]


def _special_cases(
    raw: Any,
    method: str,
    arguments: Mapping[str, ArgumentSpec],
    dims: Callable[[], Iterable[Symbol]],
    problems: list[str],
) -> tuple[Conditions, ...]:
    """Read the declared cases of a method."""
    if not isinstance(raw, (list, tuple)):
        problems.append(f"'$' 'special_cases' is {raw!r}, not a list of cases")
        return ()
    if not raw or problems:
        return tuple(raw)
    types = {name: argument_type(name, spec) for name, spec in arguments.items()}
    sizes = [size for type in types.values() for size in sizes_of(type) if isinstance(size, Dim)]
    own = [symbol for size in sizes for symbol in size.symbols]
    try:
        known = {s.name: s for s in merge_facts((s, method) for s in (*own, *dims())).values()}
    except DimError:  # the trace says it in full
        return tuple(raw)
    read: list[Case] = []
    for conditions in raw:
        try:
            read.append(read_case(method, conditions, known, types))
        except PassError as error:
            problems.append(_in_one_line(error))
    if not problems:
        try:
            refuse_unreachable(method, read)
        except PassError as error:
            problems.append(_in_one_line(error))
    return tuple(dict(case.conditions) for case in read)


def _in_one_line(error: PassError) -> str:
    more = "; ".join(part for part in (*error.details, error.help) if part)
    return f"'$' 'special_cases': {error.what}" + (f" ({more})" if more else "")


@dataclass(frozen=True)
class ModuleSpec:
    """The specs of all methods to export, in order."""

    methods: Mapping[str, MethodSpec] = field(default_factory=dict)

    @staticmethod
    def from_raw(raw: Any, module: Any) -> ModuleSpec:
        """Read a raw spec against `module`'s methods; the raw spec is left as it was.

        Raises SpecError that lists the problems of all methods at once.
        """
        if isinstance(raw, ModuleSpec):
            return raw
        if not isinstance(raw, Mapping):
            raise SpecError(f"the spec is {raw!r}, not a dict from method names to specs", help=_EXAMPLE)
        methods: dict[str, MethodSpec] = {}
        problems: list[str] = []
        dims = cache(lambda: _dims_of(module))  # a walk of the tree, which only special cases need
        for name, method_raw in raw.items():
            method = getattr(module, name, None) if isinstance(name, str) else None
            if method is None:
                near = nearest(name, [n for n in dir(type(module)) if n[0] != "_"])
                problems.append(f"{type(module).__name__} has no method {name!r}{'; ' if near else ''}{near}")
                continue
            if not callable(method) or hasattr(method, "named_parameters"):  # another module
                problems.append(f"{name!r} is a {type(method).__name__}, not a method: call it in one")
                continue
            try:
                methods[name] = MethodSpec.from_raw(method_raw, method, dims)
            except SpecError as error:
                problems.extend(f"{name}: {line}" for line in (error.details or (error.what,)))
        if problems:
            raise SpecError("the spec does not fit the module", details=problems)
        if not methods:
            raise SpecError("the spec names no method", help=_EXAMPLE)
        return ModuleSpec(methods)


_EXAMPLE = "write {'forward': {'x': spec.Tensor(['batch', 4], 'float32')}}: methods, then their arguments"


def _dims_of(module: Any) -> list[Symbol]:
    """The dims of a module's parameters."""
    parameters = getattr(module, "parameters", None)
    sizes = [size for p in (parameters() if callable(parameters) else ()) for size in sizes_of(p.type)]
    return [symbol for size in sizes if isinstance(size, Dim) for symbol in size.symbols]
