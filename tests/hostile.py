# SPDX-License-Identifier: Apache-2.0
"""Values that nobody means well by, and limits for what has to do with them: shared by all fuzzers.

`VALUES` are numbers, strings and nestings one by one, `hostile_value` draws one or puts several into each other. `json.dumps` writes all of
them, and `json.loads` reads them back.
"""

from __future__ import annotations

import contextlib
import math
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 60
"""Of processor time, which other processes do not take from: what is refused or done takes a hundredth of it."""
ROOM_BYTES = 1 << 30

NUMBERS: tuple[bool | int | float, ...] = (
    *(0, 1, -1, 2, 3, 7, 1000, 65_537),
    *(2**31, 2**40, 2**63 - 1, 2**63, -(2**63) - 1, 10**18, 10**30, 10**4000),
    *(0.5, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan, True, False),
)

STRINGS: tuple[str, ...] = (
    *("", " ", "x", "None", "nan", "1e999", "-1", "9" * 5000, "a" * 100_000, "é\u202e\x00\x1b[2J", "\ud800"),
    *("../x", "/etc/passwd", "/dev/zero", "a/../../b", "C:\\x", "n" * 300),
    *("__import__('os').system('true')", "torch.load('x')", "';raise SystemExit#", "__class__", "lambda: 0"),
    *(
        "{0.__class__.__init__.__globals__}",
        "{0[0]}",
        "{0:>1000000000}",
        "{:.999999999f}",
        "{!r:{1}}",
        "{",
        "%n%s",
    ),
    *("float32", "float99", "type(float32[3])", "dim(n)", "\u212a", "*" * 1000, "(" * 1000),
)


def nested(depth: int, leaf: Any = 0, *, of: type = list) -> Any:
    """Return a list, tuple or dict inside another, this deep."""
    for _ in range(depth):
        leaf = {"x": leaf} if of is dict else of([leaf])
    return leaf


NESTINGS: tuple[Any, ...] = (
    *([], [[]], {}, {"": {}}, [None], [[0, [1]], "x"], {"x": [1]}),
    *(nested(50), nested(50, of=dict), nested(400), nested(400, of=dict), [0] * 20_000),
)

VALUES: tuple[Any, ...] = (None, *NUMBERS, *STRINGS, *NESTINGS)


def hostile_value(rng: random.Random, depth: int = 2) -> Any:
    """Draw one of `VALUES`, or a list or dict of several."""
    kind = rng.randrange(6) if depth else 5
    if kind == 0:
        return [hostile_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 1:
        return {str(rng.choice(STRINGS)): hostile_value(rng, depth - 1) for _ in range(rng.randrange(3))}
    return rng.choice(rng.choice((NUMBERS, STRINGS, VALUES)))


class Hang(BaseException):
    """Something took too long."""


@contextlib.contextmanager
def limits(seconds: float = SECONDS, room_bytes: int = ROOM_BYTES) -> Iterator[None]:
    """End what takes too long with `Hang`, and refuse memory beyond some room with MemoryError: neither is an error that we raise."""

    def stop(signum: int, frame: Any) -> None:
        raise Hang

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + room_bytes, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
