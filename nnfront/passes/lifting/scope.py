# SPDX-License-Identifier: Apache-2.0
"""What is known about one function, and what its run-time work reads of the values that weights determine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nnfront.ir import Atom, Block, Expr, Function, If, Param, ScalarType, ShapeType, Tuple, Var, atoms_of
from nnfront.passes.effects import is_alive
from nnfront.passes.lifting.dims import KnownDims
from nnfront.passes.lifting.value_graph import Value, Values


class Refusal(NamedTuple):
    """A binding that needs only weights and yet stays, and why."""

    name: str
    reason: str


@dataclass(eq=False)
class Site:
    """One call: the callee's findings, and what its values are in the caller.

    `fields`, by index: those of its values that are fields of a tuple which the caller puts together, and what holds each there.
    """

    scope: Scope
    image: Sequence[Value | None]
    path: str
    fields: Mapping[int, Atom] = field(default_factory=dict)


@dataclass(eq=False)
class Scope:
    """What is known about one function: the values of its variables, and `uses`, those that its run-time work reads."""

    function: Function
    values: Values
    dims: KnownDims
    known: dict[Var, Value] = field(default_factory=dict)
    literals: dict[Var, Atom] = field(default_factory=dict)  # parameters that hold a dim
    sites: dict[Var, Site] = field(default_factory=dict)
    calls: list[Var] = field(default_factory=list)  # those calls that are alive, in order
    uses: dict[Value, None] = field(default_factory=dict)
    needs: set[Var] = field(default_factory=set)  # other variables that its run-time work reads
    refused: list[Refusal] = field(default_factory=list)
    has_dims: bool = False

    def __post_init__(self) -> None:
        self.body = self.function.body


def collect_uses(scope: Scope, impure: set[str]) -> None:
    """Fill `scope.uses` and `scope.needs`: what the run-time work reads that is alive."""
    known, needs = scope.known, scope.needs

    def use(value: Value) -> None:
        if isinstance(value.expr, Tuple):
            for part in value.inputs:
                use(part)
        elif value.uses_weight:
            scope.uses[value] = None

    def read(atom: Atom | None) -> None:
        if isinstance(atom, Var):
            value = known.get(atom)
            if value is None:
                needs.add(atom)
            else:
                use(value)

    def arguments(site: Site, call: Expr, *, only_numbers: bool = False) -> None:
        for param, arg in zip(site.scope.function.params, atoms_of(call), strict=True):
            if is_number(param) or not (only_numbers or param in site.scope.known):
                read(arg)

    def visit(block: Block) -> None:
        for binding in reversed(block.bindings):
            value, site = binding.value, scope.sites.get(binding.var)
            if binding.var in known:
                if site is not None:  # it may stay a call, which keeps its numbers
                    arguments(site, value, only_numbers=True)
                continue
            if not is_alive(binding, needs, impure):
                continue
            if isinstance(value, If):
                for branch in (value.then, value.otherwise):
                    read(branch.result)
                    visit(branch)
                read(value.condition)
            elif site is not None:
                scope.calls.append(binding.var)
                for inner in site.scope.uses:
                    image = site.image[inner.index]
                    assert image is not None
                    use(image)
                arguments(site, value)
            else:
                for atom in atoms_of(value):
                    read(atom)

    read(scope.body.result)
    visit(scope.body)
    scope.calls.reverse()


def is_number(param: Param) -> bool:
    """Whether a private function keeps a parameter even if nobody reads it: it may say what a dim is."""
    return isinstance(param.type, ScalarType | ShapeType)
