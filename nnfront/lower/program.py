# SPDX-License-Identifier: Apache-2.0
"""`Program`: what runs. Plain data: methods, each a frame of slots and a flat list of instructions over it.

Reading order of a printed method: signature, who binds each dim, what runs once at load (`setup`), what runs on each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nnfront.dims import Dim, Symbol, as_symbol
from nnfront.ir import Role, Type, type_text
from nnfront.lower.instructions import Block, Slot, Structure


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter of a method: where its leaves go, and its type, which the call is checked against."""

    name: str
    type: Type
    role: Role
    structure: Structure


@dataclass(frozen=True, slots=True)
class Place:
    """Where a dim gets its value: an axis of a tensor, `batch` or `max_seq` of a cache, or the value of a scalar.

    `path` leads into a nested argument. `is_weight`: it is a weight's, which loading gives its size, once for all calls; `function`
    is whose, if it is no weight of the method itself.
    """

    argument: str
    path: tuple[int, ...] = ()
    axis: int | Literal["batch", "max_seq", "value"] = "value"
    is_weight: bool = False
    function: str = ""

    @property
    def owner(self) -> str:
        """The argument in quotes, with the fields that lead to it: `'xs'[0]`."""
        return f"'{self.argument}'" + "".join(f"[{i}]" for i in self.path)

    def __str__(self) -> str:
        of = f" of {self.function}" if self.function else ""
        if self.axis == "value":
            return f"{self.owner}{of}"
        return (
            f"{self.owner}{of} axis {self.axis}"
            if isinstance(self.axis, int)
            else f"{self.owner}{of} {self.axis}"
        )


@dataclass(frozen=True, slots=True)
class DimBinding:
    """A dim of the signature: the slot that holds it, the place that defines it and the size that stands there."""

    symbol: Symbol
    slot: int
    place: Place
    size: Dim

    @property
    def is_solved(self) -> bool:
        """Whether the place says it through an expression, such as `2*n`, that has to be solved."""
        return as_symbol(self.size) != self.symbol


@dataclass(frozen=True, slots=True)
class MethodProgram:
    """One method, or one weight transform, ready to run.

    `arguments` are what a call gives, `weights` what loading binds. `setup` runs once at load: views of weights only, it makes
    no copies. `body` runs on each call. `result` is what the caller gets: written states are left out, as they are written in place.
    `transform` names the transform that makes the weights of role `transformed`. `cases` are the special cases in order, each
    under its text, in the plain form of `nnfront.cases.conditions`. `shared` are the layers of each cache, by its name, that are read again
    behind the attention that appends to them.
    """

    name: str
    arguments: tuple[Argument, ...]
    weights: tuple[Argument, ...]
    dims: tuple[DimBinding, ...]
    slots: tuple[Slot, ...]
    setup: Block
    body: Block
    result: Structure
    transform: str | None = None
    target: str = "cpu"
    cases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shared: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @property
    def results(self) -> dict[str, int]:
        """The slot of each result by name, in order."""
        fields = self.result.fields
        names = self.result.names or tuple(str(i) for i in range(len(fields)))
        return {name: part.slot for name, part in zip(names, fields, strict=True)}

    def __str__(self) -> str:
        arguments = ", ".join(f"{a.name}: {type_text(a.type)}" for a in self.arguments)
        lines = [f"{self.name}({arguments}):"]
        lines += [f"  dim {b.symbol} from {b.place}" for b in self.dims]
        lines += [f"  {w.role} {w.name}: {type_text(w.type)}" for w in self.weights]
        for title, block in (("setup", self.setup), ("body", self.body)):
            if block.instructions or title == "body":
                lines += [f"  {title}:", *block.text(self.slots, "    ")]
        lines.append(f"  return {self.result.text(self.slots)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Program:
    """All methods and weight transforms of a module, for one target."""

    target: str
    methods: Mapping[str, MethodProgram]
    transforms: Mapping[str, MethodProgram]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def used_transforms(self) -> dict[str, MethodProgram]:
        """The transforms whose results methods read, by name, in order."""
        used = {method.transform for method in self.methods.values()}
        return {name: found for name, found in self.transforms.items() if name in used}

    def __str__(self) -> str:
        parts = [str(m) for m in (*self.transforms.values(), *self.methods.values())]
        return f"program for {self.target}\n\n" + "\n\n".join(parts) + "\n"
