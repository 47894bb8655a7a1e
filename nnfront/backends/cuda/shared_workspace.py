# SPDX-License-Identifier: Apache-2.0
"""The workspace that all launches on one stream share: allocated and set to zero once, where a launch alone would fill its counts each time.

Launches of one stream follow one another, and each leaves the counts at zero. What a graph was captured with it keeps using, so what has
become too small for a later launch is kept beside its larger successor.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nnfront.backends.cuda.kernel_package import kernel_module


class SharedWorkspace:
    """A lender for launches that follow one another."""

    def __init__(self) -> None:
        self._made: list[Any] = []

    def __call__(self, sizes: Any, device: torch.device) -> Any:
        """Return what holds so much; it is twice as large as the last one where that has become too small."""
        has = self._made[-1] if self._made else None
        if has is not None:
            if has.partial.numel() >= sizes.partial and has.arrived.numel() >= sizes.arrived:
                return has
            sizes = type(sizes)(
                max(2 * has.partial.numel(), sizes.partial), max(2 * has.arrived.numel(), sizes.arrived)
            )
        made = kernel_module("split_k").allocated(sizes, device)
        # Memory and zeros of a capture are there when its graph is replayed, and then only.
        if not _captures(device):
            self._made.append(made)
        return made


_STREAMS: dict[Hashable, SharedWorkspace] = {}


def _of_stream(sizes: Any, device: torch.device) -> Any:
    """Lend the workspace of the current stream; the CPU, where kernels are interpreted, has one for each thread.

    What somebody captures may be replayed on any stream: there each launch has its own.
    """
    if device.type == "meta" or _captures(device):
        return kernel_module("split_k").allocated(sizes, device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else threading.get_ident()
    return _STREAMS.setdefault((device, stream), SharedWorkspace())(sizes, device)


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def sharing(lender: Callable[[Any, torch.device], Any] | None = None) -> Iterator[None]:
    """Let launches have a lender's workspace inside of this; without one that of their stream, unless a lender is at work outside."""
    split_k = sys.modules.get("nnfront_kernels.split_k")  # a program without kernels imports none
    if split_k is None or (lender is None and split_k.lender() is not split_k.allocated):
        yield
        return
    with split_k.lending(lender or _of_stream):
        yield
