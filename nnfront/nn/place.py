# SPDX-License-Identifier: Apache-2.0
"""The place in the author's code that is being executed: the nearest caller outside this package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


def user_place() -> str:
    """Return `file:line` of the nearest caller outside this package."""
    file, line = user_frame()
    return f"{file}:{line}" if file else ""


def user_frame() -> tuple[str, int]:
    """Return file and line of the nearest caller outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_internal(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


_internal: dict[str, bool] = {}


def _is_internal(file: str) -> bool:
    known = _internal.get(file)
    if known is None:
        known = _internal[file] = file.startswith(_PACKAGE)
    return known
