# SPDX-License-Identifier: Apache-2.0
"""The function behind a kernel that has no implementation of its own: the torch reference of its op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nnfront.ops  # noqa: F401 - declares the ops
from nnfront.errors import LowerError
from nnfront.ir import OPS, Op
from nnfront.lower.instructions import Run
from nnfront.ops.returned import is_foreign, returner


def op_of(run: Run) -> Op:
    """Return the op of an instruction. Raises LowerError for one that this program does not have."""
    op = OPS.get(run.op)
    if op is None:
        raise LowerError(
            f"there is no op {run.op!r}", where=run.module, help="import what registers it before loading"
        )
    return op


def name_of(run: Run) -> str:
    """Name what an instruction runs: its op, or the function of others that this stands for."""
    op = OPS.get(run.op)
    return run.op if op is None or not is_foreign(op) else returner(op, run.attrs)


def reference(run: Run) -> Callable[..., Any]:
    """Return the op's reference with its constant attributes built in: operands by position, sized attributes by keyword.

    Raises LowerError for an op that this program does not have.
    """
    return op_of(run).bound(run.attrs)
