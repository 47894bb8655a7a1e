# SPDX-License-Identifier: Apache-2.0
"""`Function` and `IRModule`: what export makes, passes rewrite, and `lower` reads."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nnfront.ir.equal import first_difference
from nnfront.ir.expr import NO_ATTRS
from nnfront.ir.interfaces import FunctionData
from nnfront.ir.printer import print_function, print_module
from nnfront.ir.summary import summarize
from nnfront.ir.walk import functions_of, walk_exprs


@dataclass(frozen=True, eq=False)
class Function(FunctionData):
    """Parameters, bindings in order, and a result. It owns its dims: names carry the identity across functions.

    A function with state parameters returns a tuple: its result, then the written handle of each state parameter in order.
    `is_outlined` says of a fused function that a pass made it in this process, so that its attributes say what its body computes and a
    kernel may run in its place. Text does not have it: what is parsed is what its body says.
    """

    @property
    def callees(self) -> tuple[str, ...]:
        """The functions that it calls, each once, in order."""
        return tuple(dict.fromkeys(name for expr in walk_exprs(self) for name in functions_of(expr)))

    def with_(self, **changes: Any) -> Function:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def text(self, *, provenance: bool = False) -> str:
        """Return the text form; with `provenance`, a comment on each binding says where it comes from."""
        return print_function(self, provenance=provenance)

    def __str__(self) -> str:
        return self.text()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Function):
            return NotImplemented
        return first_difference(self, other) is None

    __hash__ = None  # type: ignore[assignment]


class IRModule(Mapping[str, Function]):
    """Functions by name, in order. Iterates over names, like a dict.

    `attrs` holds what belongs to the whole model: `aliases` maps other checkpoint names of a tied parameter to its name, `unread`
    are the names of parameters that no method reads, which a checkpoint may hold all the same, as it may tensors that `ignored`, names
    and patterns, says.
    """

    __slots__ = ("_functions", "attrs")

    def __init__(self, functions: Iterable[Function] = (), attrs: Mapping[str, Any] = NO_ATTRS) -> None:
        self._functions = {function.name: function for function in functions}
        self.attrs = attrs

    def __getitem__(self, name: str) -> Function:
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    @property
    def functions(self) -> tuple[Function, ...]:
        """All functions in order."""
        return tuple(self._functions.values())

    @property
    def methods(self) -> tuple[Function, ...]:
        """The public functions in order."""
        return tuple(f for f in self._functions.values() if f.kind == "public")

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other checkpoint names of tied parameters, each with the parameter's own name."""
        aliases: Mapping[str, str] = self.attrs.get("aliases", NO_ATTRS)
        return aliases

    def with_functions(self, functions: Iterable[Function]) -> IRModule:
        """Return a module with these functions and the same attributes: this one if they are its own, in their order."""
        new = tuple(functions)
        is_same = len(new) == len(self) and all(map(operator.is_, new, self.functions))
        return self if is_same else IRModule(new, self.attrs)

    def with_versions(
        self, methods: Mapping[str, Function], made: Iterable[tuple[str, Function]]
    ) -> IRModule:
        """Return a module with methods rewritten, by name, and behind each private function the versions made of it, one of which may take its name; what is called no more goes."""
        versions: dict[str, list[Function]] = {}
        for name, function in made:
            versions.setdefault(name, []).append(function)
        functions: list[Function] = []
        for old in self.functions:
            own = versions.get(old.name, [])
            is_replaced = any(f.name == old.name for f in own)
            functions += own if is_replaced else [methods.get(old.name, old), *own]
        called = {callee for f in functions for callee in f.callees}
        return self.with_functions(f for f in functions if f.name not in versions or f.name in called)

    def text(self, *, provenance: bool = False) -> str:
        """Return the text form; `ir.parse` reads it back."""
        return print_module(self, provenance=provenance)

    def summary(self) -> str:
        """Return a table of methods, dims, weights and op counts that fits on two screens for any model."""
        return summarize(self)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<IRModule {', '.join(self)}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IRModule):
            return NotImplemented
        return first_difference(self, other) is None

    __hash__ = None  # type: ignore[assignment]
