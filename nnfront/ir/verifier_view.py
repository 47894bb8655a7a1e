# SPDX-License-Identifier: Apache-2.0
"""What the rules of the verifier look at: one function as nested scopes and as one list, and errors that say where."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, get_args

from nnfront.dims import Dim
from nnfront.errors import VerifyError
from nnfront.ir.expr import Atom, Binding, Block, Call, Constant, If, MatchShape
from nnfront.ir.facts import NO_FACTS, Facts, branch_facts
from nnfront.ir.types import Type
from nnfront.ir.value_numbering import expr_key
from nnfront.ir.walk import atoms_of, sizes_in_atoms, sizes_in_attrs

if TYPE_CHECKING:
    from nnfront.ir.module import Function

_TYPES = get_args(Type)


class Step(NamedTuple):
    """A binding and its operands; for an `if`, the condition and the scopes of its branches."""

    binding: Binding
    atoms: tuple[Atom | None, ...]
    branches: tuple[Scope, ...] = ()


class Scope(NamedTuple):
    """A block: its steps, its result, and the binding of the `if` that it is a branch of."""

    steps: list[Step]
    result: Atom
    owner: Binding | None


class Body:
    """One function under verification.

    `root` is its block, `steps` all its bindings in one list (those of a branch before its `if`), `results` the result of every
    block with the binding that it belongs to.
    """

    def __init__(self, function: Function, functions: Mapping[str, Function]) -> None:
        self.function = function
        self.functions = functions
        self.steps: list[Step] = []
        self.results: list[tuple[Atom, Binding | None]] = []
        self.root = self._scope(function.body, None)
        self._same: dict[int, tuple[Type, Type]] = {}
        self._interned: dict[Type, Type] = {}

    def _scope(self, block: Block, owner: Binding | None) -> Scope:
        steps = []
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, If):
                branches = (self._scope(value.then, binding), self._scope(value.otherwise, binding))
                step = Step(binding, (value.condition,), branches)
            else:
                step = Step(binding, atoms_of(value))
            steps.append(step)
            self.steps.append(step)
        self.results.append((block.result, owner))
        return Scope(steps, block.result, owner)

    @cached_property
    def types(self) -> list[tuple[Type, Binding | None]]:
        """Every type that is written in the function, each object once, with the binding where it is."""
        found: dict[int, tuple[Type, Binding | None]] = {
            id(p.type): (p.type, None) for p in self.function.params
        }
        for binding, atoms, _ in self.steps:
            found.setdefault(id(binding.var.type), (binding.var.type, binding))
            if isinstance(binding.value, MatchShape):
                found.setdefault(id(binding.value.type), (binding.value.type, binding))
            for atom in atoms:
                if isinstance(atom, Constant):
                    found.setdefault(id(atom.type), (atom.type, binding))
        return list(found.values())

    @cached_property
    def calls(self) -> list[tuple[Binding, Call]]:
        """Every call of an op."""
        return [
            (step.binding, step.binding.value) for step in self.steps if isinstance(step.binding.value, Call)
        ]

    @cached_property
    def call_keys(self) -> list[Hashable]:
        """For each of `calls` what its type depends on: equal keys, equal types."""
        interned = self.interned
        return [
            expr_key(call, [None if arg is None else id(interned(arg.type)) for arg in call.args])
            for _, call in self.calls
        ]

    @cached_property
    def defines_dims(self) -> bool:
        """Whether there is a `match_shape`."""
        return any(isinstance(step.binding.value, MatchShape) for step in self.steps)

    @cached_property
    def branch_facts(self) -> dict[int, Facts]:
        """By the id of each `if` what is known of dims where its condition holds."""
        return branch_facts(self.function)

    @cached_property
    def facts(self) -> dict[Binding, Facts]:
        """What is known of dims at each binding that is in a branch whose condition says something."""
        found: dict[Binding, Facts] = {}
        if not self.branch_facts:
            return found

        def visit(scope: Scope, known: Facts) -> None:
            for binding, _, branches in scope.steps:
                if known:
                    found[binding] = known
                if branches:
                    then, otherwise = branches
                    visit(then, self.branch_facts.get(id(binding.value), known))
                    visit(otherwise, known)

        visit(self.root, NO_FACTS)
        return found

    @cached_property
    def operand_dims(self) -> dict[Binding, list[Dim]]:
        """The dims in the operands and attributes of each binding that has some."""
        found: dict[Binding, list[Dim]] = {}
        for binding, atoms, _ in self.steps:
            if dims := [*sizes_in_atoms(atoms), *sizes_in_attrs(binding.value)]:
                found[binding] = dims
        return found

    def interned(self, type: Type) -> Type:
        """Return one and the same object for all types that are equal."""
        known = self._same.get(id(type))
        if known is None:
            # The type stays alive with its id: that of a literal is made anew each time it is asked for.
            known = self._same[id(type)] = self._interned.setdefault(type, type), type
        return known[0]

    def error(
        self, what: str, binding: Binding | None = None, *, details: Iterable[str] = (), help: str = ""
    ) -> VerifyError:
        """Return the error that `what` (its rule first) is wrong with a binding, or with the function as a whole."""
        where = self.function.name
        if binding is not None:
            where = f"{binding.var.name!r} in {where}"
            if binding.provenance and str(binding.provenance):
                where = f"{where}, from {binding.provenance}"
        return VerifyError(what, details=details, where=where, help=help)


Rule: TypeAlias = Callable[[Body], Iterator[VerifyError]]
"""What yields an error for each place where a function breaks a rule."""
