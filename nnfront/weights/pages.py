# SPDX-License-Identifier: Apache-2.0
"""Memory in which pieces of files follow one another, made without copying wherever pages allow it.

A concatenation of tensors along their first axis is the bytes of its parts in a row. The virtual memory system can put them in
a row without moving them: reserve addresses, then map the pages of each part into its place. That works for the whole pages
of a part whose place in the result and offset in its file agree modulo the page size; only the two ends of each part, and
parts that don't agree, are read into the reserved memory instead. For matrices of whole pages that is all of a model's
fused weights: they cost no time to make, no anonymous memory, and processes share them in the page cache.

Mapped pages are private: a write through a tensor changes this process's copy, never the file. Truncating a file that is mapped
is fatal for whoever reads it, so files are replaced by renaming, never rewritten.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nnfront.errors import LoadError

PAGE = mmap.PAGESIZE
CHUNK_BYTES = 16 << 20
"""Bytes of one read: large enough to cost nothing, small enough for Ctrl-C to be answered in milliseconds."""

_MIN_MAPPED_BYTES = 256 << 10
"""A shorter run of pages is read: a mapping costs a system call and one of the 65530 that Linux grants a process."""
_HUGE_BYTES = 4 << 20
"""From here on memory that is read into is advised to use huge pages: 1.27 GB took 0.21 s instead of 0.67 s."""
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000 if os.uname().sysname == "Linux" else 0x40
_FAILED = ctypes.c_void_p(-1).value

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)


class Piece(NamedTuple):
    """Bytes of an open file."""

    fd: int
    offset: int
    size: int
    file: str


def lay_out(pieces: Sequence[Piece], alignment: int) -> tuple[mmap.mmap, int]:
    """Return memory that holds the pieces one after another, and where in it the first byte is: a multiple of `alignment`.

    The memory lives as long as the object or any buffer made from it; there must be at least one byte.
    Raises LoadError if a file cannot be read.
    """
    runs = list(_runs(pieces))
    size = sum(piece.size for piece in pieces)
    start = _best_start(runs, alignment)
    memory = mmap.mmap(-1, start + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    view = memoryview(memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    to_read = [part for run in runs for part in _place(base, start, start + size, run)]
    if sum(piece.size for _, piece in to_read) >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    for at, piece in to_read:
        read_at(piece, view[at : at + piece.size])
    return memory, start


def read_at(piece: Piece, out: memoryview) -> None:
    """Read the piece into `out`, which has its size, past Python's lock and without mapping the file.

    Raises LoadError if the file ends early or cannot be read.
    """
    done = 0
    while done < piece.size:
        try:
            count = os.preadv(piece.fd, [out[done : done + CHUNK_BYTES]], piece.offset + done)
        except OSError as error:
            raise LoadError(f"{piece.file}: reading failed: {error.strerror}") from error
        if not count:
            raise LoadError(
                f"{piece.file}: the file ends at byte {piece.offset + done}; it was longer when its header was read"
            )
        done += count


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
    """Join pieces that follow one another in the file already; yield each with its place in the result."""
    place = 0
    current: Piece | None = None
    for piece in pieces:
        if current and current.fd == piece.fd and current.offset + current.size == piece.offset:
            current = current._replace(size=current.size + piece.size)
            continue
        if current:
            yield place, current
            place += current.size
        current = piece
    if current:
        yield place, current


def _best_start(runs: Sequence[tuple[int, Piece]], alignment: int) -> int:
    """Return the place in the first page at which most bytes can be mapped."""
    votes: dict[int, int] = {}
    for place, piece in runs:
        start = (piece.offset - place) % PAGE
        if piece.size >= _MIN_MAPPED_BYTES and start % alignment == 0:
            votes[start] = votes.get(start, 0) + piece.size
    return max(votes, key=lambda start: votes[start], default=0)


def _place(base: int, start: int, stop: int, run: tuple[int, Piece]) -> Iterator[tuple[int, Piece]]:
    """Map what pages allow of a run; yield what must be read, each part with its place in the memory [start, stop)."""
    begin, piece = start + run[0], run[1]
    end = begin + piece.size
    # Nothing else lives in the first and in the last page of the memory, so they may be mapped in part.
    first = _floor(begin) if begin == start else -_floor(-begin)
    last = -_floor(-end) if end == stop else _floor(end)
    aligned = (piece.offset - begin) % PAGE == 0
    if not (aligned and last - first >= _MIN_MAPPED_BYTES and _map(base, first, last, piece, begin)):
        yield begin, piece
        return
    if first > begin:
        yield begin, piece._replace(size=first - begin)
    if end > last:
        yield last, piece._replace(offset=piece.offset + last - begin, size=end - last)


def _floor(place: int) -> int:
    return place // PAGE * PAGE


def _map(base: int, first: int, last: int, piece: Piece, begin: int) -> bool:
    """Map the file's pages over the reserved ones; say whether the system allowed it."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    address = _mmap(base + first, last - first, protection, flags, piece.fd, piece.offset + first - begin)
    return bool(address != _FAILED)
