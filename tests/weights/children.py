# SPDX-License-Identifier: Apache-2.0
"""Copies of this process, which have everything imported, and kills of them that a machine's speed does not move."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> int:
    """Do something in a copy of this process and return its id; it ends with 0 if nothing was raised."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def moments_of(work: Callable[[], object]) -> int:
    """How often work asks the file system for something."""
    reader, writer = os.pipe()
    child = in_child(lambda: _watched(work, lambda _: os.write(writer, b".")))
    os.close(writer)
    count = 0
    while some := os.read(reader, 1 << 16):
        count += len(some)
    os.close(reader)
    assert code_of(child) == 0
    return count


def kill_at(work: Callable[[], object], moment: int, delay: float = 0.0) -> None:
    """Do it in a copy of this process, which is killed before it asks the file system for the `moment`-th time, or so many seconds after that, which may be while it writes.

    So a kill is placed by what has been done, not by a clock: it comes in the middle on a machine of any speed.
    """

    def kill(asked: int) -> None:
        if asked == moment and delay:
            signal.setitimer(
                signal.ITIMER_REAL, delay
            )  # nobody handles its signal, so the system ends the process
        elif asked == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    code_of(in_child(lambda: _watched(work, kill)))


def _watched(work: Callable[[], object], before: Callable[[int], object]) -> None:
    """Do it, and before each time that it asks the file system tell which time it is."""
    asked = 0

    def count(event: str, _: object) -> None:
        nonlocal asked
        if event == "open" or event.startswith(("os.", "fcntl.")):
            asked += 1
            before(asked)

    sys.addaudithook(count)
    work()
