# SPDX-License-Identifier: Apache-2.0
"""The rules that IR keeps, numbered: each is one function whose name and docstring say it.

The rules about meaning are asked only if all functions keep those about form: the type of a value says nothing in something that
is no program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from nnfront.dims import Dim, bounded_work
from nnfront.errors import VerifyError
from nnfront.ir.budget import MAX_DIM_TERMS
from nnfront.ir.infer import map_sizes
from nnfront.ir.print_types import type_text
from nnfront.ir.rules_form import FORM
from nnfront.ir.rules_ranks import v22_ranks_meet_alike
from nnfront.ir.rules_state import HANDLES
from nnfront.ir.rules_types import TYPES
from nnfront.ir.types import Type
from nnfront.ir.verifier_view import Body, Rule

if TYPE_CHECKING:
    from nnfront.ir.module import IRModule

MEANING: tuple[Rule, ...] = (*TYPES, *HANDLES, v22_ranks_meet_alike)

_ANY = Dim("any")


def verify(module: IRModule) -> None:
    """Raise VerifyError for the first rule that the module breaks: `V4: 'x' is bound twice`, and where."""
    with bounded_work(MAX_DIM_TERMS):
        for error in _violations(module):
            raise error


def violations(module: IRModule) -> list[VerifyError]:
    """Return what is wrong with a module: for each function that breaks a rule, all that breaks the first such rule."""
    with bounded_work(MAX_DIM_TERMS):
        return list(_violations(module))


def _violations(module: IRModule) -> Iterator[VerifyError]:
    bodies = [Body(function, module) for function in module.values()]
    stages = (
        v1_functions_are_under_their_names(module),
        _stage(bodies, FORM),
        v12_no_function_calls_itself(module),
        _stage(bodies, MEANING),
        v21_weights_agree(module),
    )
    return _first_broken(stages)


def _stage(bodies: list[Body], rules: tuple[Rule, ...]) -> Iterator[VerifyError]:
    for body in bodies:
        yield from _first_broken(rule(body) for rule in rules)


def _first_broken(checks: Iterable[Iterator[VerifyError]]) -> Iterator[VerifyError]:
    """Yield all that the first check finds that finds anything."""
    for errors in checks:
        is_kept = True
        for error in errors:
            is_kept = False
            yield error
        if not is_kept:
            return


def v1_functions_are_under_their_names(module: IRModule) -> Iterator[VerifyError]:
    """A module holds each function under its own name."""
    for name, function in module.items():
        if name != function.name:
            yield VerifyError(f"V1: the function {function.name!r} is filed under {name!r}")


def v12_no_function_calls_itself(module: IRModule) -> Iterator[VerifyError]:
    """No function calls itself, directly or through others."""
    try:
        TopologicalSorter({name: function.callees for name, function in module.items()}).prepare()
    except CycleError as error:
        yield VerifyError(f"V12: a function calls itself: {' -> '.join(reversed(error.args[1]))}")


def v21_weights_agree(module: IRModule) -> Iterator[VerifyError]:
    """Weights of one checkpoint name have one type in all public functions and transforms, up to the names of dims."""
    first: dict[str, tuple[Type, str]] = {}
    for function in module.values():
        for param in function.params:
            if param.role != "weight" or function.kind not in ("public", "transform"):
                continue
            known, owner = first.setdefault(param.name, (param.type, function.name))
            if known is not param.type and known != param.type and _unnamed(known) != _unnamed(param.type):
                yield VerifyError(
                    f"V21: the weight {param.name!r} has two types",
                    details=[f"in {owner} {type_text(known)}", f"in {function.name} {type_text(param.type)}"],
                )


def _unnamed(type: Type) -> Type:
    return map_sizes(type, lambda size: _ANY if isinstance(size, Dim) else size)
