# SPDX-License-Identifier: Apache-2.0
"""What a thread does between two steps of a call: a call that takes long may be set aside there, for others with the same cache.

It is known by the thread and not by the call, as those who step are far below those who know that there is something else to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nnfront.state.use import Use


class _Between(threading.local):
    do: Callable[[], None] | None = None


BETWEEN = _Between()
"""`do` of this thread is called behind each step of a call, if there is one."""


@contextmanager
def between_steps(do: Callable[[], None] | None) -> Iterator[None]:
    """Have the calls that are made inside do this between their steps."""
    before, BETWEEN.do = BETWEEN.do, do
    try:
        yield
    finally:
        BETWEEN.do = before


@contextmanager
def set_aside(use: Use) -> Iterator[None]:
    """Inside of this, in what is done between two steps, other calls can be made with the cache of the one that goes on behind it."""
    with between_steps(None), use.set_aside(), torch.inference_mode(False):
        yield
