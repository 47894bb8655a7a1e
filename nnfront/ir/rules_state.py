# SPDX-License-Identifier: Apache-2.0
"""Rules about handles: the values of caches, each of which is written once, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from nnfront.errors import VerifyError
from nnfront.ir.expr import Atom, Binding, Call, FunctionCall, Projection, Var
from nnfront.ir.print_types import type_text
from nnfront.ir.types import StateLayerType, StateType, TensorType, TupleType, Type
from nnfront.ir.verifier_view import Body, Rule, Scope, Step

Path: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[Var, Path]
"""A handle: a variable, and the fields that lead to it if the variable is a tuple."""


def v19_states_come_back(body: Body) -> Iterator[VerifyError]:
    """A function with state parameters returns a tuple: its result, then a handle for each of them, in order."""
    states = body.function.states
    if not states:
        return
    result = body.function.result_type
    if not isinstance(result, TupleType) or len(result.fields) != 1 + len(states):
        what = f"V19: the result must be a tuple of a value and {len(states)} written handles"
        yield body.error(what, details=[f"got {type_text(result)}"])
        return
    for state, type in zip(states, result.fields[1:], strict=True):
        if state.type != type:
            yield body.error(
                f"V19: the state {state.name!r} does not come back in its place",
                details=[f"got {type_text(type)}", f"expected {type_text(state.type)}"],
            )


def v20_handles_are_used_once(body: Body) -> Iterator[VerifyError]:
    """A handle is used up once: written, passed on or returned. It may be read before that, not after; no written one is lost.

    Both branches of an `if` use up the same handles.
    """
    handles = _Handles(body)
    for param in body.function.params:
        for path in handles.paths(param.type):
            # An input may merely be read; a state has to come back.
            handles.live[param, path] = None
            if param.role != "state":
                handles.kept.add((param, path))
    if handles.live or any(handles.paths(step.binding.var.type) for step in body.steps):
        yield from handles.scope(body.root)


class _Handles:
    """The handles that are there at one point of a function: `live` ones, and `used` ones with what used them up."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.live: dict[Place, Binding | None] = {}  # and the binding that made it
        self.used: dict[Place, str] = {}
        self.kept: set[Place] = set()  # need not be used up
        self._paths: dict[int, tuple[Path, ...]] = {}
        self._written: dict[str, set[int]] = {}  # by callee, which arguments are states

    def paths(self, type: Type) -> tuple[Path, ...]:
        """Where handles are in a value of a type: one empty path for a handle itself."""
        if isinstance(type, TensorType):
            return ()
        known = self._paths.get(id(type))
        if known is None:
            if isinstance(type, StateType | StateLayerType):
                known = ((),)
            elif isinstance(type, TupleType):
                known = tuple((i, *path) for i, field in enumerate(type.fields) for path in self.paths(field))
            else:
                known = ()
            self._paths[id(type)] = known
        return known

    def scope(self, scope: Scope) -> Iterator[VerifyError]:
        """Go through a block; at its end every handle that it made has been used up."""
        for step in scope.steps:
            yield from self.branches(step) if step.branches else self.step(step)
            var = step.binding.var
            for path in self.paths(var.type):
                self.live[var, path] = step.binding
        yield from self.use_up(scope.result, (), "the result", scope.owner)
        own = {step.binding.var for step in scope.steps}
        if scope.owner is None:
            own.update(self.body.function.params)
        for place, maker in list(self.live.items()):
            if place[0] in own and place not in self.kept:
                del self.live[place]
                yield self.body.error(
                    f"V20: the handle {_name(place)} is never passed on or given back", maker
                )

    def step(self, step: Step) -> Iterator[VerifyError]:
        """Look at one binding: which handles it reads, and which it uses up."""
        binding, value = step.binding, step.binding.value
        held = [(i, a) for i, a in enumerate(step.atoms) if isinstance(a, Var) and self.paths(a.type)]
        if not held:
            return
        name = repr(binding.var.name)
        if isinstance(value, Projection):
            yield from self.use_up(value.tuple, (value.index,), name, binding)
            return
        writes = self._writes(value, len(step.atoms))
        passes_on = writes is None and bool(self.paths(binding.var.type))
        for i, var in held:
            if passes_on or (writes is not None and i in writes):
                yield from self.use_up(var, (), name, binding)
            else:
                yield from self.read(var, binding)

    def _writes(self, value: object, count: int) -> set[int] | None:
        """Which operands a call writes; None for what passes on all its handles if its result has handles."""
        if isinstance(value, FunctionCall):
            if value.function not in self._written:
                params = self.body.functions[value.function].params
                self._written[value.function] = {i for i, p in enumerate(params) if p.role == "state"}
            return self._written[value.function]
        if isinstance(value, Call) and value.op.writes:
            operands = value.op.operands * count if value.op.is_variadic else value.op.operands
            return {i for i, operand in enumerate(operands) if operand.name == value.op.writes}
        return None

    def read(self, var: Var, binding: Binding) -> Iterator[VerifyError]:
        """Read a value: its handles must not be used up."""
        for path in self.paths(var.type):
            if (var, path) in self.used:
                what = f"V20: the handle {_name((var, path))} is read after {self.used[var, path]} used it up"
                yield self.body.error(what, binding)

    def use_up(self, atom: Atom, prefix: Path, by: str, binding: Binding | None) -> Iterator[VerifyError]:
        """Use up the handles of a variable, or of the field of it that `prefix` leads to."""
        for path in self.paths(atom.type) if isinstance(atom, Var) else ():
            if path[: len(prefix)] != prefix:
                continue
            assert isinstance(atom, Var)
            place = (atom, path)
            if place in self.used:
                what = f"V20: the handle {_name(place)} is used again: {self.used[place]} used it up"
                yield self.body.error(what, binding)
            self.live.pop(place, None)
            self.used[place] = by

    def branches(self, step: Step) -> Iterator[VerifyError]:
        """Go through both branches of an `if` from the same state."""
        live, used = dict(self.live), dict(self.used)
        ends = []
        for branch in step.branches:
            self.live, self.used = dict(live), dict(used)
            yield from self.scope(branch)
            ends.append({place: self.used[place] for place in live if place in self.used})
        if ends[0].keys() != ends[1].keys():
            place = next(iter(ends[0].keys() ^ ends[1].keys()))
            yield self.body.error(f"V20: only one branch uses up the handle {_name(place)}", step.binding)
        self.used = {**used, **ends[1], **ends[0]}
        self.live = {place: maker for place, maker in live.items() if place not in self.used}


def _name(place: Place) -> str:
    var, path = place
    return repr(f"{var.name}{''.join(f'[{i}]' for i in path)}")


HANDLES: tuple[Rule, ...] = (v19_states_come_back, v20_handles_are_used_once)
