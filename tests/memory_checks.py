# SPDX-License-Identifier: Apache-2.0
"""What a run takes in memory, by torch's own count: each allocation and release of its CPU allocator, in order."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def measured_peak(function: Callable[[], Any]) -> int:
    """Return the most bytes that were allocated at a time while the function ran, beyond those from before."""
    gc.disable()  # what others left behind would count as freed by the function
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            result = function()
    finally:
        gc.enable()
    events = found.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    live = peak = 0
    for _, _, change in changes:
        live += change
        peak = max(peak, live)
    del result
    return peak
