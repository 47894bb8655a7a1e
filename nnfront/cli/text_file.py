# SPDX-License-Identifier: Apache-2.0
"""Texts that a command is given as files, or writes."""

from __future__ import annotations

import sys
from pathlib import Path

from nnfront.errors import RunError


def read_text(path: str) -> str:
    """Read a file, or stdin for `-`. Raises RunError if it cannot be read, or is no UTF-8."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode()
    except OSError as error:
        raise RunError(f"cannot read the text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is not a text in UTF-8: byte {error.start} is wrong") from None


def write_text(path: str, text: str) -> None:
    """Write a file. Raises RunError if it cannot be."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None
