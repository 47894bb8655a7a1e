# SPDX-License-Identifier: Apache-2.0
"""Files that come from outside: which of them are opened, how much of one is read, and what JSON may hold.

A folder with a model is what somebody else has made. All that is read of it is opened and parsed here, within one budget:

    files    regular ones: no pipe or device is waited for. Each is opened once and stays what it was, whatever takes its place
    links    to a file of the same folder or, from a snapshot in a Hugging Face cache, of that cache's `blobs`. Nowhere else: files that
             are the reader's and not the folder's must not be taken for its own, for an artefact that is made of it would hold them
    bytes    MAX_BYTES of anything but tensors, compared with the file's size before one is read
    JSON     MAX_VALUES values, MAX_DEPTH levels, numbers of MAX_DIGITS digits
"""

from __future__ import annotations

import json
import os
import re
import stat
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnfront.errors import LoadError

MAX_BYTES = 128 << 20
"""Of any file but one of tensors: the largest tokenizer.json have 40 MB, the indexes of the largest checkpoints 10."""
MAX_VALUES = 5_000_000
"""The tokenizer.json of a vocabulary of 262,144 has 1.8 million; a list of nothing but lists takes 70 bytes for each."""
MAX_DEPTH = 100
MAX_DIGITS = 400
"""A float that is written without an exponent has up to 309."""

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Folder:
    """A folder, held open: its files are opened by name, once, and stay open as long as this object lives.

    If another folder takes its place, this one is still the old one. May be used from several threads.
    Raises LoadError for a path that is no folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._home = os.path.realpath(path)
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        except (OSError, ValueError) as error:
            raise LoadError(f"{shown_text(str(self.path))} cannot be opened: {_reason(error)}") from None
        self._fds: dict[str, int] = {}
        weakref.finalize(self, _close, self._fd, self._fds)

    @property
    def is_current(self) -> bool:
        """Whether the path still leads to the folder that was opened."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return False

    def names(self, below: str = ".") -> list[str]:
        """Return the names of all that is in the folder, or in a folder in it; none if that is no folder. Raises LoadError."""
        try:
            fd = os.open(below, _FLAGS | os.O_DIRECTORY, dir_fd=self._fd)
        except OSError:
            return []
        try:
            return sorted(os.listdir(fd))
        except OSError as error:
            raise LoadError(f"{self.path / below} cannot be listed: {_reason(error)}") from None
        finally:
            os.close(fd)

    def has(self, name: str) -> bool:
        """Whether there is anything of this name, or was when it was opened."""
        if name in self._fds:
            return True
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except (OSError, ValueError):
            return False
        return True

    def why_not(self, name: str) -> str:
        """Why there is nothing of this name, where more is known than that."""
        return ""

    def open(self, name: str) -> int:
        """Return the open file of this name (parts joined by /). Raises LoadError for what is not one of the folder's regular files."""
        fd = self._fds.get(name)
        if fd is None:
            opened = self._open(name)
            fd = self._fds.setdefault(name, opened)  # another thread may have been faster
            if fd != opened:
                os.close(opened)
        return fd

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises LoadError as `open` does, and for one of more than MAX_BYTES."""
        fd = self.open(name)
        size = os.fstat(fd).st_size
        if size > MAX_BYTES:
            raise _unreadable(self.path / name, f"it has {size} bytes, {MAX_BYTES} are the most")
        try:
            return read_bytes(fd, 0, size)
        except OSError as error:
            raise _unreadable(self.path / name, _reason(error)) from None

    def read_json(self, name: str, *, is_strict: bool = False) -> Any:
        """Return the value that a JSON file holds. Raises LoadError as `read` does, and for what `parse_json` refuses."""
        try:
            return parse_json(self.read(name), is_strict=is_strict)
        except ValueError as error:
            raise LoadError(f"{self.path / name} is not valid JSON", details=[str(error)]) from None

    def close(self, names: Iterable[str]) -> None:
        """Close files that nobody will read any more."""
        for name in names:
            if (fd := self._fds.pop(name, None)) is not None:
                os.close(fd)

    def _open(self, name: str) -> int:
        path = self.path / name
        try:
            place = os.path.join(self._home, name)
            found = os.path.realpath(place)
            if not self._may_lead_to(found):
                raise _unreadable(
                    path,
                    f"it leads out of the folder, to {shown_text(found)}",
                    "put the file itself into the folder",
                )
            fd = os.open(name, _FLAGS, dir_fd=self._fd) if found == place else os.open(found, _FLAGS)
        except (OSError, ValueError) as error:
            raise _unreadable(path, _reason(error)) from None
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind != stat.S_IFREG:
            os.close(fd)
            raise _unreadable(path, f"it is {_KINDS.get(kind, 'something else')}, not a regular file")
        return fd

    def _may_lead_to(self, found: str) -> bool:
        homes = [Path(self._home)]
        homes += [folder.parent / "blobs" for folder in homes[0].parents if folder.name == "snapshots"]
        return any(Path(found).is_relative_to(home) for home in homes)


@dataclass(frozen=True, slots=True)
class File:
    """A file of a folder that is held open."""

    folder: Folder
    name: str

    def copy_to(self, path: Path) -> None:
        """Write its content to another path. Raises LoadError if it cannot be read, OSError if it cannot be written."""
        path.write_bytes(self.folder.read(self.name))


def read_bytes(fd: int, offset: int, size: int) -> bytes:
    """Return so many bytes of an open file, fewer if it ends before. Raises OSError."""
    data = bytearray(size)
    done = 0
    while done < size and (count := os.preadv(fd, [memoryview(data)[done:]], offset + done)):
        done += count
    return bytes(data[:done])


def parse_json(data: bytes, *, is_strict: bool = False) -> Any:
    """Return the value that JSON in UTF-8 says. Raises ValueError, with the reason, for what is none and for what is beyond the budget.

    `is_strict`: no name twice in an object, no NaN and no infinity; else the last of equal names counts, as everywhere in Python.
    """
    check_size(data)
    hooks: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _constant} if is_strict else {}
    try:
        found = json.loads(data.decode("utf-8"), parse_int=_integer, **hooks)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    level = [found]
    for _ in range(MAX_DEPTH + 1):
        level = [value for holder in level for value in _values(holder) if isinstance(value, dict | list)]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if _SURROGATE.search(data):
        # Half a character is none: UnicodeEncodeError, a ValueError.
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    return found


def check_size(data: bytes) -> None:
    """Raise ValueError for JSON that may hold more than MAX_VALUES values."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES} values")


def shown(value: Any) -> str:
    """Return what stands in a file, cut to a length that fits a message."""
    return shown_text(repr(value), 100)


def shown_text(text: str, most: int = 300) -> str:
    """Return a text, cut to a length that fits a message."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _values(holder: Any) -> Any:
    return holder.values() if isinstance(holder, dict) else holder if isinstance(holder, list) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{shown(name)} occurs twice")
        fields[name] = value
    return fields


def _constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it holds a number of {len(text)} digits, {MAX_DIGITS} are the most")
    return int(text)


def _unreadable(path: Path, reason: str, help: str = "") -> LoadError:
    return LoadError(f"{shown_text(str(path))} cannot be read", details=[reason], help=help)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _close(fd: int, fds: dict[str, int]) -> None:
    for each in (fd, *fds.values()):
        os.close(each)
