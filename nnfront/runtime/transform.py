# SPDX-License-Identifier: Apache-2.0
"""Run a weight transform: each weight is read just before it is needed and dropped just after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nnfront.lower import MethodProgram
from nnfront.runtime.cpu import resolve
from nnfront.runtime.execute import initial_frame, run_lazily
from nnfront.runtime.signature import observed
from nnfront.runtime.signature import resolve as resolve_dims


def run_transform(
    program: MethodProgram, source: Mapping[str, Any], *, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Return the transform's results by name. `progress` is told how many instructions of how many have run."""
    frame = initial_frame(program.slots)
    found = [
        item
        for w in program.weights
        if any(b.place.argument == w.name for b in program.dims)
        for item in observed(w, source[w.name])
    ]
    known = resolve_dims(f"{program.name}: weight", found, [b for b in program.dims if b.place.is_weight], {})
    for binding in program.dims:
        frame[binding.slot] = known[binding.symbol][0]
    names = {slot: w.name for w in program.weights for slot in w.structure.leaves()}
    dims = {b.symbol: b.slot for b in program.dims}
    total = len(program.body.instructions)
    with torch.inference_mode():
        steps = run_lazily(
            program.body, program.slots, resolve, lambda slot: source[names[slot]], dims, frame
        )
        for done, _ in enumerate(steps, 1):
            if progress is not None:
                progress(done, total)
    assert program.result.names is not None
    leaves = zip(program.result.names, program.result.fields, strict=True)
    return {
        name: source[names[part.slot]] if part.slot in names else frame[part.slot] for name, part in leaves
    }
