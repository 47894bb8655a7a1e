# SPDX-License-Identifier: Apache-2.0
"""What a module holds, in one table that fits on two screens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nnfront.ir.module import IRModule


def summarize(module: IRModule) -> str:
    """Return the summary."""
    return "\n".join(f"{f.name}: {len(f.bindings)} bindings" for f in module.functions)
