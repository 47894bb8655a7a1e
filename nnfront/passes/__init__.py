# SPDX-License-Identifier: Apache-2.0
"""Rewrites of the IR: each pass is a pure function IRModule -> IRModule in a file of its name.

`base` says what a pass is and runs it. The order of passes is in `PIPELINES` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnfront.errors import PassError
from nnfront.ir import IRModule
from nnfront.passes.base import PASSES, Pass, Step, module_pass, run_steps
from nnfront.passes.lift_transform_params import lift_transform_params

PIPELINES: dict[str, tuple[Step, ...]] = {"none": ()}

__all__ = ["PASSES", "PIPELINES", "Pass", "lift_transform_params", "module_pass", "run"]


def run(ir: IRModule, pipeline: str | Sequence[Step]) -> IRModule:
    """Run the passes of a pipeline, by its name or listed, in order."""
    if isinstance(pipeline, str):
        if pipeline not in PIPELINES:
            raise PassError(
                f"there is no pipeline {pipeline!r}", help=f"use one of {', '.join(map(repr, PIPELINES))}"
            )
        pipeline = PIPELINES[pipeline]
    return run_steps(ir, pipeline)
