# SPDX-License-Identifier: Apache-2.0
"""Make a folder whole or not at all: it is written beside its place and moved there in one step.

    PARENT/.NAME.1f2e3d4c.nnfront-tmp    being written, under a lock; its owner's death ends the lock
    PARENT/NAME                          the folder; what was there before is exchanged in one step, then removed

Whatever happens on the way, PARENT/NAME is the old folder or the new one. What a killed writer has left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from nnfront.errors import LoadError
from nnfront.weights.temporary import make_folder, remove_dead, sync

SUFFIX = ".nnfront-tmp"
ASIDE = ".nnfront-old"
"""Ends the name of what was in the place before, where the file system cannot exchange two folders in one step."""

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def put_folder(folder: Path, check_replaceable: Callable[[Path], None]) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end of the block it becomes `folder`, and all is on disk.

    `check_replaceable` is asked about a folder there that is not empty, before the block and after it, and raises if it is to stay.
    Raises LoadError if the folder cannot be made. If the block raises, nothing has changed.
    """
    place = Path(os.path.realpath(folder))
    _check(place, check_replaceable)
    with writing(folder):
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(place)
        temporary, lock = make_folder(place, SUFFIX)
    try:
        yield temporary
        _check(place, check_replaceable)
        with writing(folder):
            for file in temporary.rglob("*"):
                sync(file)
            sync(temporary)
            _move(temporary, place)
            sync(place.parent)
    finally:
        os.close(lock)
        shutil.rmtree(temporary, ignore_errors=True)  # what was not moved, or what was there before


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the system refuses inside of this is a LoadError about a folder."""
    try:
        yield
    except OSError as error:
        raise LoadError(f"{folder} cannot be written: {error.strerror}") from error


def _check(place: Path, check_replaceable: Callable[[Path], None]) -> None:
    if not os.path.lexists(place):
        return
    if not place.is_dir():
        raise LoadError(f"{place} is there already and is no folder", help="choose another place")
    if any(place.iterdir()):
        check_replaceable(place)


def _remove_dead(place: Path) -> None:
    """Remove what killed writers have left; the old folder only if there is a new one."""
    suffixes = (SUFFIX, ASIDE) if place.exists() else (SUFFIX,)
    remove_dead(f for s in suffixes for f in place.parent.glob(f".{glob.escape(place.name)}.*{s}"))


def _move(temporary: Path, place: Path) -> None:
    """Put the folder in its place; what was there ends up under the temporary name."""
    try:
        os.rename(temporary, place)  # nothing there, or an empty folder
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if _exchange(temporary, place):
        return
    # A file system that cannot exchange: for a moment nothing is in the place.
    aside = place.with_name(f".{place.name}.{secrets.token_hex(4)}{ASIDE}")
    os.rename(place, aside)
    try:
        os.rename(temporary, place)
    except OSError:
        os.rename(aside, place)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, two: Path) -> bool:
    """Exchange two folders in one step; say whether the system can."""
    if not hasattr(_libc, "renameat2"):
        return False
    paths = os.fsencode(one), os.fsencode(two)
    done = _libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
    if done != 0 and ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return bool(done == 0)
