# SPDX-License-Identifier: Apache-2.0
"""Temporary files and folders, each under a lock of its writer, which ends with the writer: one without a lock was left by the dead.

Whoever makes one waits for its lock and looks whether it is still there, since before that it looks like a dead writer's. On a file
system without locks nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path


def make_file(beside: Path, suffix: str) -> tuple[Path, int]:
    """Make an empty file beside a path, hidden, and return it, open for writing; closing it ends its lock. Raises OSError."""
    while True:
        file = _unused(beside, suffix)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if _is_locked(file, fd):
            return file, fd


def make_folder(beside: Path, suffix: str) -> tuple[Path, int]:
    """Make an empty folder beside a path, hidden, and return it with its lock, which is to be closed. Raises OSError."""
    while True:
        folder = _unused(beside, suffix)
        folder.mkdir()
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            if _is_locked(folder, fd):
                return folder, fd


def remove_dead(paths: Iterable[Path]) -> None:
    """Remove those temporary files and folders whose writers live no more."""
    for path in paths:
        with contextlib.suppress(OSError):  # somebody else was faster, or somebody has locked it
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            finally:
                os.close(fd)


def sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unused(beside: Path, suffix: str) -> Path:
    return beside.with_name(f".{beside.name}.{secrets.token_hex(4)}{suffix}")


def _is_locked(path: Path, fd: int) -> bool:
    """Lock what has just been made, and say whether it is still there; if not, close it."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)
    if path.exists():
        return True
    os.close(fd)
    return False
