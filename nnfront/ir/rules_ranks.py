# SPDX-License-Identifier: Apache-2.0
"""Rules about several processes that run one program: all of them meet in the same collectives, in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from nnfront.errors import VerifyError
from nnfront.ir.callgraph import reached
from nnfront.ir.expr import Atom, Binding, Call, Var
from nnfront.ir.types import TensorType
from nnfront.ir.verifier_view import Body, Scope
from nnfront.ir.walk import functions_of, reachable, variables_of, walk_exprs

if TYPE_CHECKING:
    from nnfront.ir.module import Function


def v22_ranks_meet_alike(body: Body) -> Iterator[VerifyError]:
    """A collective is under no condition that data decide: ranks might see it differently, and one wait for others for ever. Sizes are alike for all."""
    if not any(step.branches for step in body.steps):
        return
    made = {step.binding.var: step.binding for step in body.steps}
    for step in body.steps:
        if step.branches and _reads_data(step.atoms[0], made):
            for scope in step.branches:
                for binding, name in _meetings(scope, body.functions):
                    yield body.error(
                        f"V22: {name} is under a condition that data decide",
                        binding,
                        details=[
                            "ranks might decide differently, and then one waits for others that do not come"
                        ],
                        help="take it out of the branch, or let sizes decide",
                    )


def _reads_data(condition: Atom | None, made: Mapping[Var, Binding]) -> bool:
    """Whether a tensor has a say in a condition."""
    start = [condition] if isinstance(condition, Var) else []
    read = reachable(start, lambda var: variables_of(made[var].value) if var in made else ())
    return any(isinstance(var.type, TensorType) for var in read)


def _meetings(scope: Scope, functions: Mapping[str, Function]) -> Iterator[tuple[Binding, str]]:
    """The bindings of a branch, and of those in it, in which ranks meet, each with the collective's name."""
    for step in scope.steps:
        value = step.binding.value
        names = [value.op.name] if isinstance(value, Call) and value.op.collective else []
        for name in (*names, *_meetings_of(functions_of(value), functions)):
            yield step.binding, name
            break
        for branch in step.branches:
            yield from _meetings(branch, functions)


def _meetings_of(names: Iterator[str], functions: Mapping[str, Function]) -> Iterator[str]:
    """The collectives of functions and of those that they call."""
    called = [functions[name] for name in names]
    every = (*called, *(functions[name] for name in reached(functions, called)))
    return (e.op.name for f in every for e in walk_exprs(f) if isinstance(e, Call) and e.op.collective)
