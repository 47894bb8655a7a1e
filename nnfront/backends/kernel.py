# SPDX-License-Identifier: Apache-2.0
"""`Kernel`: one kernel of a back end, all that is said of it in one record; and what a kernel may look at when it is asked about a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from nnfront.ir import TensorType, Type, WeightLayout
from nnfront.lower.instructions import Run
from nnfront.lower.slots import Frame
from nnfront.memory.allocations import Workspace


@dataclass
class Context:
    """What a kernel may look at and add to: the slots, and the instruction that made each value so far."""

    frame: Frame
    makers: dict[int, Run]
    target: str = "cpu"
    shared: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    """What rewriting has emitted for several calls."""
    emitted: list[Run] = field(default_factory=list)

    def inside(self) -> Context:
        """The context of a branch: what is made there is not there afterwards."""
        return Context(self.frame, dict(self.makers), self.target, dict(self.shared))

    def type(self, slot: int) -> Type | None:
        return self.frame.slots[slot].type

    def tensor(self, slot: int) -> TensorType:
        """Type of a slot that holds a tensor."""
        type = self.frame.slots[slot].type
        assert isinstance(type, TensorType)
        return type

    def is_none(self, slot: int) -> bool:
        """Whether the slot stands for an operand that is absent."""
        return self.frame.slots[slot].kind == "constant" and self.frame.slots[slot].value is None

    def is_bound_at_load(self, slot: int) -> bool:
        """Whether the slot is a weight, or a view of one."""
        maker = self.makers.get(slot)
        if maker is not None:
            return maker.op == "permute_dims" and self.is_bound_at_load(maker.inputs[0])
        return self.frame.slots[slot].kind == "weight"

    def emit(
        self,
        like: Run,
        op: str,
        inputs: tuple[int, ...],
        attrs: Mapping[str, Any],
        type: Type,
        *,
        kernel: str = "",
    ) -> tuple[int, ...]:
        """Put another call in front of this one; return the slots of its result."""
        result = self.frame.structure(kernel or op, "value", type)
        run = Run(kernel or op, op, inputs, result, attrs, module=like.module, line=like.line)
        self.emitted.append(replace(run, why=f"for {like.op}") if kernel else run)
        return tuple(result.leaves())


ACCEPTED = ""
"""What a kernel says to a call that it can run; anything else is the reason why it cannot."""

Accepts: TypeAlias = Callable[[Run, Context], str]
"""ACCEPTED, or the reason why a kernel cannot run a call."""

Rewrite: TypeAlias = Callable[[Run, Context], "Run | str"]
"""Sees a call as another one (`matmul(x, permute_dims(w))` as `linear(x, w)`), or says why it cannot."""

Bind: TypeAlias = Callable[[Run], Callable[..., Any]]
"""From an instruction to the function that runs it: operands by position, None for one that is absent, sized attributes by keyword."""

NOTHING = Workspace(lambda run, *operands: 0)
"""The workspace of a kernel that allocates its result alone."""


def always(run: Run, context: Context) -> str:
    """Accept every call."""
    return ACCEPTED


def unchanged(run: Run, context: Context) -> Run:
    """The call itself."""
    return run


@dataclass(frozen=True)
class Kernel:
    """One kernel of a back end.

    name        what `explain` shows
    op          the op, or the fusion that `outline` makes, whose calls it may run; "" for one that only rewriting asks for
    bind        gives the function that runs a call
    why         why it is the one to choose, for `explain`
    accepts     whether it can run a call, or the reason why not
    rewrite     sees a call as another one first
    workspace   the bytes that it allocates besides its results; None: it is metered, by running it on tensors without data
    reads_back  whether it waits for a result on the host, so that no graph can capture it
    write       how the native tape of a CPU writes a call (`cpu/tape_builder`), if it can: the one predicate of what its part in C takes
    layout      how it wants its weights stored, which the compiler makes of those of another fusion's calls and lifts; None: as they are
    in_rows     whether it reads weights row by row: one that is a transpose, or a part of each row, is copied when it is loaded
    """

    name: str
    op: str
    bind: Bind
    why: str = "reference"
    accepts: Accepts = always
    rewrite: Rewrite = unchanged
    workspace: Workspace | None = None
    reads_back: bool = False
    write: Callable[..., Any] | None = None
    layout: WeightLayout | None = None
    in_rows: bool = False

    def of(self, op: str, rewrite: Rewrite) -> Kernel:
        """Return the kernel for calls of another op, seen as those of its own."""
        return replace(self, op=op, rewrite=rewrite)
