# SPDX-License-Identifier: Apache-2.0
"""What functions hold and modules show to those who print, compare and sum them up, which `module` calls and which cannot know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from nnfront.dims import Symbol
from nnfront.ir.expr import NO_ATTRS, Atom, Binding, Block, Param
from nnfront.ir.types import FunctionType, Type, type_symbols

# public: callable from outside. private: called by other functions only. transform: runs once, over weights.
# fused: primitive, made by outlining, may be refined by passes that ask. external: primitive, never touched.
Kind: TypeAlias = Literal["public", "private", "transform", "fused", "external"]
KINDS: tuple[Kind, ...] = ("public", "private", "transform", "fused", "external")


@dataclass(frozen=True, eq=False)
class FunctionData:
    """What a function holds, without its text. See `Function`, which prints and compares it."""

    name: str
    params: tuple[Param, ...]
    bindings: tuple[Binding, ...]
    result: Atom
    kind: Kind = "public"
    attrs: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRS)
    is_outlined: bool = False

    @property
    def inputs(self) -> tuple[Param, ...]:
        """Parameters that a caller gives on each call, states included."""
        return tuple(p for p in self.params if p.role in ("input", "state"))

    @property
    def weights(self) -> tuple[Param, ...]:
        """Parameters that are bound once: checkpoint weights and transformed weights."""
        return tuple(p for p in self.params if p.role in ("weight", "transformed"))

    @property
    def states(self) -> tuple[Param, ...]:
        """Parameters that are handles which the function writes and gives back."""
        return tuple(p for p in self.params if p.role == "state")

    @property
    def body(self) -> Block:
        """Bindings and result as a block."""
        return Block(self.bindings, self.result)

    @property
    def result_type(self) -> Type:
        """Type of the result, written handles included."""
        return self.result.type

    @property
    def type(self) -> FunctionType:
        """Type of the function as a value."""
        return FunctionType(tuple(p.type for p in self.params), self.result_type)

    @property
    def is_primitive(self) -> bool:
        """Whether passes leave it alone unless they ask for primitive functions."""
        return self.kind in ("fused", "external")

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The dims that the parameters' types name, by first occurrence."""
        return tuple(dict.fromkeys(symbol for param in self.params for symbol in type_symbols(param.type)))


class ModuleLike(Protocol):
    """An `IRModule`, to look at."""

    @property
    def attrs(self) -> Mapping[str, Any]: ...
    @property
    def functions(self) -> tuple[FunctionData, ...]: ...
    @property
    def methods(self) -> tuple[FunctionData, ...]: ...
    def __getitem__(self, name: str, /) -> FunctionData: ...
    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, name: object, /) -> bool: ...
