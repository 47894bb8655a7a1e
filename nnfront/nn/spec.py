# SPDX-License-Identifier: Apache-2.0
"""What a method is called with: `Tensor`, `Int`, `Object`, `Tuple`, `Cache`, and the specs of methods and modules.

A raw spec is a dict of dicts, read by `ModuleSpec.from_raw` without changing it:

    {"prefill": {"tokens": spec.Tensor(["batch", "seq"], "int64"), "n": int, "cache": spec.Cache(...)}}

The key `"$"` of a method may hold `param_mode` and `effect_mode` (`plain`, `packed` or `none`).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from nnfront import dtypes
from nnfront.dims import Dim, Size, to_size
from nnfront.errors import NnfrontError, SpecError

Mode: TypeAlias = Literal["plain", "packed", "none"]


class Tensor:
    """A tensor argument. `shape`: ints, dim names, dim expressions or Dims; `dtype`: a dtype name."""

    def __init__(self, shape: Sequence[int | str | Dim], dtype: str = "float32") -> None:
        if isinstance(shape, str):
            raise SpecError(
                f"spec.Tensor: the shape is the text {shape!r}, not a list",
                help=f"write [{shape!r}] for one axis",
            )
        self.shape: tuple[Size, ...] = tuple(to_size(size) for size in shape)
        self.dtype: str = dtypes.check(str(dtype).removeprefix("torch."))

    def __repr__(self) -> str:
        return f"Tensor([{', '.join(str(s) for s in self.shape)}], {self.dtype!r})"


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


class Cache:
    """A key/value cache argument: `layers` layers of `kv_heads` heads of `head_size`, for `batch` x `max_seq` tokens.

    `window`: how many last positions attention sees: an int or None for all layers, or one entry for each layer.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_size: int,
        dtype: str = "float32",
        batch: int | str | Dim = "batch",
        max_seq: int | str | Dim = "max_seq",
        window: int | Sequence[int | None] | None = None,
    ) -> None:
        windows = tuple(window) if isinstance(window, Sequence) else (window,) * layers
        if len(windows) != layers:
            raise SpecError(f"spec.Cache: {layers} layers but {len(windows)} windows")
        for name, count in (("layers", layers), ("kv_heads", kv_heads), ("head_size", head_size)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise SpecError(f"spec.Cache: {name} is {count!r}, not a positive int")
        self.layers = layers
        self.kv_heads = kv_heads
        self.head_size = head_size
        self.dtype = dtypes.check(str(dtype).removeprefix("torch."))
        self.batch = to_size(batch)
        self.max_seq = to_size(max_seq)
        self.windows = windows

    def __repr__(self) -> str:
        return f"Cache({self.layers}, {self.kv_heads}, {self.head_size}, {self.dtype!r}, {self.batch}, {self.max_seq})"


ArgumentSpec: TypeAlias = Tensor | Int | Object | Tuple | Cache


def convert(raw: Any, name: str) -> ArgumentSpec:
    """Turn one raw argument spec into its object.

    `int` and `"int"` stand for Int(), a list or tuple for Tuple, a class for Object. Raises SpecError for anything else.
    """
    if isinstance(raw, (Tensor, Int, Object, Tuple, Cache)):
        return raw
    if raw is Int or raw is int or raw == "int":
        return Int()
    if isinstance(raw, (list, tuple)):
        return Tuple(name, raw)
    if isinstance(raw, type) and raw not in (Tensor, Object, Tuple, Cache, str, float, bool):
        return Object(raw)
    raise SpecError(
        f"{name!r} has the spec {raw!r}, which is none",
        help="use spec.Tensor, spec.Int, spec.Object, spec.Tuple or spec.Cache",
    )


@dataclass(frozen=True)
class MethodSpec:
    """One method: its function, and the spec of each argument in the order of its signature."""

    method: Callable[..., Any]
    arguments: Mapping[str, ArgumentSpec]
    param_mode: Mode = "plain"
    effect_mode: Mode = "plain"

    @property
    def arg_names(self) -> list[str]:
        """Names of the arguments, in order."""
        return list(self.arguments)

    @property
    def arg_specs(self) -> list[ArgumentSpec]:
        """Specs of the arguments, in order."""
        return list(self.arguments.values())

    @staticmethod
    def from_raw(raw: Any, method: Callable[..., Any]) -> MethodSpec:
        """Read the raw spec of one method against its Python signature.

        Raises SpecError that lists every unknown, missing and ill-typed entry at once.
        """
        if isinstance(raw, MethodSpec):
            return raw
        if not isinstance(raw, Mapping):
            raise SpecError(f"the spec is {raw!r}, not a dict from argument names to specs")
        problems: list[str] = []
        signature = inspect.signature(method)
        modes = _modes(raw.get("$", {}), problems)
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
                    problems.append(error.what)
            elif signature.parameters[name].default is inspect.Parameter.empty:
                problems.append(f"{name!r} is missing")
        for name in given:
            if name not in by_keyword:
                near = difflib.get_close_matches(str(name), by_keyword, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                problems.append(f"{name!r} is not an argument{hint}")
        if problems:
            raise SpecError(
                "the spec does not fit the method", details=[*problems, f"signature: {signature}"]
            )
        return MethodSpec(method, arguments, *modes)


def _modes(raw: Any, problems: list[str]) -> tuple[Mode, Mode]:
    if not isinstance(raw, Mapping):
        problems.append(f"'$' is {raw!r}, not a dict")
        return "plain", "plain"
    for key in raw:
        if key not in ("param_mode", "effect_mode"):
            problems.append(f"'$' has the unknown key {key!r}")
    modes = []
    for key in ("param_mode", "effect_mode"):
        mode = raw.get(key, "plain")
        if mode not in get_args(Mode):
            problems.append(f"'$' {key!r} is {mode!r}, not one of {', '.join(map(repr, get_args(Mode)))}")
        modes.append(mode)
    return modes[0], modes[1]


@dataclass(frozen=True)
class ModuleSpec:
    """The specs of all methods to export, in order."""

    methods: Mapping[str, MethodSpec] = field(default_factory=dict)

    @property
    def method_names(self) -> list[str]:
        """Names of the methods, in order."""
        return list(self.methods)

    @property
    def method_specs(self) -> list[MethodSpec]:
        """Specs of the methods, in order."""
        return list(self.methods.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self.methods)

    @staticmethod
    def from_raw(raw: Any, module: Any) -> ModuleSpec:
        """Read a raw spec against `module`'s methods; the raw spec is left as it was.

        Raises SpecError that lists the problems of all methods at once.
        """
        if isinstance(raw, ModuleSpec):
            return raw
        if not isinstance(raw, Mapping):
            raise SpecError(f"the spec is {raw!r}, not a dict from method names to specs")
        methods: dict[str, MethodSpec] = {}
        problems: list[str] = []
        for name, method_raw in raw.items():
            method = getattr(module, name, None) if isinstance(name, str) else None
            if not callable(method):
                near = difflib.get_close_matches(str(name), [n for n in dir(type(module)) if n[0] != "_"], 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                problems.append(f"{type(module).__name__} has no method {name!r}{hint}")
                continue
            try:
                methods[name] = MethodSpec.from_raw(method_raw, method)
            except SpecError as error:
                problems.extend(f"{name}: {line}" for line in (error.details or (error.what,)))
        if problems:
            raise SpecError("the spec does not fit the module", details=problems)
        return ModuleSpec(methods)
