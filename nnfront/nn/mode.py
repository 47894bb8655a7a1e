# SPDX-License-Identifier: Apache-2.0
"""The mode that is active, a trace or an eager run, and the places that errors get where none is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, Protocol, TypeVar

from nnfront.errors import InferError, NnfrontError, TraceError
from nnfront.ir import Op, Type, type_text
from nnfront.nn.source_location import user_place

P = ParamSpec("P")
Result = TypeVar("Result")


class Mode(Protocol):
    """What ops and modules defer to. `effects`: the state of each effect, by id."""

    effects: dict[int, tuple[Any, ...]]

    def apply(self, op: Op, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Any:
        """Apply one op to the author's operands and return the author's results."""
        ...

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module's forward."""
        ...

    def cond(self, predicate: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Choose between two branches by a boolean known when the method runs."""
        ...

    def scan(self, body: Callable[[Any, Any], Any], carry: Any, xs: Any, axis: int) -> tuple[Any, Any]:
        """Call `body(carry, x)` for each slice of `xs` along an axis, counted from the front; return the last carry and what steps made."""
        ...

    def allow_change(self, owner: Any, what: str) -> None:
        """Raise TraceError if `what` of a parameter or module must not be set now."""
        ...


active_mode: ContextVar[Mode | None] = ContextVar("active_mode", default=None)


def outside_place() -> str:
    """Return `file:line` of the author's code for an error; empty while a mode is active, which names the module path too."""
    return user_place() if active_mode.get() is None else ""


def names_place(function: Callable[P, Result]) -> Callable[P, Result]:
    """Give the errors that `function` raises the author's line where it is called outside any mode."""

    @functools.wraps(function)
    def placed(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except NnfrontError as error:
            error.where = error.where or outside_place()
            raise

    return placed


def out_of_trace(x: Any) -> TraceError:
    """Return the error for something that stands for a variable, used where that variable does not exist."""
    return TraceError(
        f"{x!r} is used where it has no meaning",
        details=["it was made in another trace, or in a branch of op.cond that has ended"],
        where=outside_place(),
        help="give it on as an argument or a result; what a method keeps for later does not outlive its trace",
    )


def located(error: InferError, op: Op, types: Sequence[Type | None], where: str) -> InferError:
    """Return `error` with the op's name, its operands' types and the place."""
    names = (
        [f"{op.operands[0].name}[{i}]" for i in range(len(types))]
        if op.is_variadic
        else [o.name for o in op.operands]
    )
    shown = [f"{name}: {type_text(t)}" for name, t in zip(names, types, strict=False) if t is not None]
    return InferError(
        error.what, details=[*error.details, *shown], where=where or error.where, help=error.help
    )


def canonical(op: Op, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the attributes in their stored form, or raise what is wrong with them, with its place."""
    try:
        return op.canonical_attrs(types, attrs)
    except InferError as error:
        raise located(error, op, types, outside_place()) from None


def infer(op: Op, types: Sequence[Type | None], attrs: Mapping[str, Any], where: str) -> Type:
    """Infer the result's type, or raise what is wrong with the operands, with their types and their place."""
    try:
        return op.result_type(types, attrs)
    except InferError as error:
        raise located(error, op, types, where or outside_place()) from None
