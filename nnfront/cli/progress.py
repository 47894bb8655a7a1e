# SPDX-License-Identifier: Apache-2.0
"""A progress bar on stderr, for people: none where nobody looks, and none for work that is done at once."""

from __future__ import annotations

import sys
from collections.abc import Callable

SECONDS = 0.5
"""Work that takes less shows no bar."""


def progress_bar(what: str, unit: str = "", *, scale: bool = False) -> Callable[[int, int], None] | None:
    """Return what a bar is told with (done, total); None if stderr is no terminal or tqdm is not installed.

    `unit` names what is counted; with `scale` in thousands, millions and so on.
    """
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    bars: list[tqdm] = []

    def show(done: int, total: int) -> None:
        if not bars:
            bars.append(tqdm(desc=what, unit=unit, unit_scale=scale, total=total, delay=SECONDS, leave=False))
        bar = bars[0]
        bar.update(done - bar.n)
        if done == total:
            bars.pop().close()

    return show
