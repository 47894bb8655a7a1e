# SPDX-License-Identifier: Apache-2.0
"""A capturer without a GPU: every call of torch and every launch of a kernel with the tensors they got, to be done again on these tensors.

No Python of what was captured runs again. What it took from the host, a length or a mask, is what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from nnfront_kernels.common import Plan, jit, launched_by
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

# What a GPU refuses while work is captured: values that the host reads, results whose size depends on values, and what the host has made
# of values that it knows.
REFUSED = {
    "aten._local_scalar_dense.default",
    "aten.item.default",
    "aten.is_nonzero.default",
    "aten.equal.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten._unique2.default",
    "aten.bincount.default",
    "aten.lift_fresh.default",
}


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Tape(TorchDispatchMode):
    """What has been done inside of it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Callable[[], None]] = []
        self.names: list[str] = []
        self.made: dict[int, int] = {}  # bytes by address, of memory that came to be inside

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would load its compiler

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func) in REFUSED:
            raise RuntimeError(f"{func} is not permitted while work is captured")
        result = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tensors_of((args, kwargs))}
        fresh = [t for t in tensors_of(result) if t.untyped_storage()._cdata not in given]
        self.made |= {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in fresh}

        def again() -> None:
            for old, new in zip(tensors_of(result), tensors_of(func(*args, **kwargs)), strict=True):
                if old.untyped_storage()._cdata not in given:  # neither a view nor written in place
                    old.copy_(new)

        self.entries.append(again)
        self.names.append(str(func))
        return result

    def launch(self, plan: Plan) -> None:
        """A launcher that writes the plan down as well."""
        with _disable_current_modes():
            jit(plan)
        self.entries.append(lambda: jit(plan))
        self.names.append(plan.kernel.__name__)

    def replay(self) -> None:
        """Do it all again."""
        with torch.inference_mode():
            for entry in self.entries:
                entry()


class TapeCapture:
    """Captures on tapes. `fails` are the kernels that cannot be captured."""

    def __init__(self, fails: str = "") -> None:
        self.tapes: list[Tape] = []
        self.fails = fails

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        tape = Tape()
        with tape, launched_by(tape.launch):
            run()
        if self.fails:
            raise RuntimeError(self.fails)
        self.tapes.append(tape)
        return tape.replay

    def is_capturing(self) -> bool:
        return False

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()
