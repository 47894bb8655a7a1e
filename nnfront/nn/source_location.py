# SPDX-License-Identifier: Apache-2.0
"""The place in the author's code that is being executed, or that an error came through: the nearest frame of no library."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import torch

# Code in these folders is not the author's: this package, and what an author's call may go through on its way here.
_LIBRARIES = tuple(
    str(Path(found).resolve().parent) + os.sep
    for found in (Path(__file__).parent, torch.__file__, np.__file__)
)


def user_place() -> str:
    """Return `file:line` of the nearest caller that is the author's."""
    file, line = user_frame()
    return f"{file}:{line}" if file else ""


def user_frame(outside: FrameType | None = None) -> tuple[str, int]:
    """Return file and line of the nearest caller that is the author's, `("", 0)` if there is none within `outside`."""
    frame = author_frame()
    return ("", 0) if frame is None or frame is outside else (frame.f_code.co_filename, frame.f_lineno)


def author_frame() -> FrameType | None:
    """Return the nearest caller that is the author's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def raising_frame(error: BaseException) -> tuple[str, int]:
    """Return file and line of the author's innermost frame among those that `error` has left, `("", 0)` if there is none."""
    found = ("", 0)
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not _is_library(file):
            found = file, trace.tb_lineno
        trace = trace.tb_next
    return found


_known: dict[str, bool] = {}


def _is_library(file: str) -> bool:
    known = _known.get(file)
    if known is None:
        known = _known[file] = file.startswith(_LIBRARIES)
    return known
