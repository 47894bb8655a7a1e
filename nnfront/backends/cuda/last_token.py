# SPDX-License-Identifier: Apache-2.0
"""The last token of a call: where tokens of nobody follow it, the one that the device says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

from nnfront.backends.kernel import ACCEPTED, NOTHING, Context, Kernel
from nnfront.dims import Dim, equal
from nnfront.holding import holding
from nnfront.lower import Run
from nnfront.lower.reference import reference

_COUNT: ContextVar[torch.Tensor | None] = ContextVar("count", default=None)


def padded(count: torch.Tensor | None) -> AbstractContextManager[object]:
    """Inside of this only the first tokens of a call are somebody's, in this thread: `count` of them, int32 [1]; None: all."""
    return holding(_COUNT, count)


def _accepts(run: Run, context: Context) -> str:
    index = context.frame.slots[run.sized["index"]].value if "index" in run.sized else None
    match index:
        case (":", (start, Dim() as stop, 1)) if equal(stop, context.tensor(run.inputs[0]).shape[1]):
            return ACCEPTED if equal(start, stop - 1) else "it takes others besides the last one"
    return "it does not take the last one along axis 1"


def _last_token(run: Run) -> Callable[..., torch.Tensor]:
    general = reference(run)

    def last_token(x: torch.Tensor, *, index: Any) -> torch.Tensor:
        count = _COUNT.get()
        last: torch.Tensor = general(x, index=index) if count is None else x.index_select(1, count - 1)
        return last

    return last_token


NAME = "last_token"
KERNELS = (
    Kernel(NAME, "getitem", _last_token, "tokens of nobody may follow it", _accepts, workspace=NOTHING),
)
