# SPDX-License-Identifier: Apache-2.0
"""Capture the work that a function gives a device, so that it can be given again without the function: CUDA graphs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from nnfront.backends.cuda.shared_workspace import SharedWorkspace, sharing
from nnfront.runtime.execute import checks_nan


class GraphCapture(Protocol):
    """Makes graphs for one user, who replays one of them at a time."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run a function, perhaps more than once, and return what does the same work on the same memory again.

        What `run` holds of tensors when it returns is written by each replay. Whether the work is done before the first one is open.
        """

    def is_capturing(self) -> bool:
        """Whether somebody else captures what this thread does now."""

    def turn(self) -> AbstractContextManager[None]:
        """Put what is given to the device inside of this behind what was in the last one, whatever streams these are."""


class CudaGraphCapture:
    """CUDA graphs of one pool of memory: what they hold in between they share, as no two of them run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None
        self._workspace = SharedWorkspace()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture a graph. The function runs once before, as libraries allocate when they meet a stream for the first time."""
        with sharing(self._workspace):
            return self._capture(run)

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on: only what this one does must be work that a graph can hold.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the last turn if it was on another stream."""
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None:
            stream.wait_event(self._last)
        try:
            yield
        finally:
            self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._last.record(stream)


def graph_capture_for(device: torch.device) -> GraphCapture | None:
    """A capturer for a GPU; None for the CPU, with NNFRONT_GRAPHS=0, and where results are looked at for NaN on the host."""
    if device.type != "cuda" or os.environ.get("NNFRONT_GRAPHS") == "0" or checks_nan():
        return None
    return CudaGraphCapture(device)
