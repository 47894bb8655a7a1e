# SPDX-License-Identifier: Apache-2.0
"""Memory in which pieces of files follow one another, made without copying wherever pages allow it.

A concatenation of tensors along their first axis is the bytes of its parts in a row. The virtual memory system can put them in
a row without moving them: reserve addresses, then map the pages of each part into its place. That works for the whole pages
of a part whose place in the result and offset in its file agree modulo the page size; only the two ends of each part, and
parts that don't agree, are read into the reserved memory instead. For matrices of whole pages that is all of a model's
fused weights: they cost no time to make, no anonymous memory, and processes share them in the page cache.

Where the file system keeps a file in memory in pieces of 2 MiB, it maps them as such if their places agree modulo 2 MiB: 512 pages with one fault, and
one entry of the processor's table of addresses for all of them.

Mapped pages are private: a write through a tensor changes this process's copy, never the file. Truncating a file that is mapped
is fatal for whoever reads it, so files are replaced by renaming, never rewritten.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nnfront.errors import LoadError

PAGE = mmap.PAGESIZE
CHUNK_BYTES = 16 << 20
"""Bytes of one read: large enough to cost nothing, small enough for Ctrl-C to be answered in milliseconds."""

MIN_MAPPED_BYTES = 256 << 10
"""A shorter run of pages is read: a mapping costs a system call and one of the 65530 that Linux grants a process."""
_HUGE_BYTES = 4 << 20
"""From here on memory that is filled is advised to use huge pages: filling 1.27 GB took 0.21 s instead of 0.67 s."""
_HUGE_PAGE = 2 << 20
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000 if os.uname().sysname == "Linux" else 0x40
_FAILED = ctypes.c_void_p(-1).value

_POPULATE_READ = 22  # Linux 5.14 and later know it, others refuse it

_LIBRARY = ctypes.CDLL(None, use_errno=True)
_madvise = _LIBRARY.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mmap = _LIBRARY.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)


class Piece(NamedTuple):
    """Bytes of a file."""

    file: Path
    offset: int
    size: int


class Run(NamedTuple):
    """A piece and where it goes: bytes [begin, begin + size) of the memory, of which pages [first, last) can be mapped."""

    piece: Piece
    begin: int
    first: int
    last: int

    def ends(self) -> Iterator[tuple[int, Piece]]:
        """Yield what remains to be read if the pages are mapped, each part with its place."""
        piece, end = self.piece, self.begin + self.piece.size
        if self.first > self.begin:
            yield self.begin, piece._replace(size=self.first - self.begin)
        if end > self.last:
            yield (
                self.last,
                piece._replace(offset=piece.offset + self.last - self.begin, size=end - self.last),
            )


def copied_bytes(pieces: Sequence[Piece], alignment: int) -> int:
    """Return how many bytes `lay_out` reads into memory of its own; all others stay pages of the files."""
    _, runs = _plan(pieces, alignment)
    return sum(r.piece.size if r.first == r.last else sum(end.size for _, end in r.ends()) for r in runs)


def lay_out(pieces: Sequence[Piece], alignment: int, fds: Mapping[Path, int]) -> tuple[mmap.mmap, int]:
    """Return memory that holds the pieces one after another, and where in it the first byte is: a multiple of `alignment`.

    `fds` are the open files. The memory lives as long as the object or any buffer made from it; there must be at least one byte.
    Raises LoadError if a file cannot be read.
    """
    start, runs = _plan(pieces, alignment)
    largest = max(runs, key=lambda run: run.last - run.first)
    spare = _HUGE_PAGE if largest.last - largest.first >= _HUGE_PAGE else 0
    memory = anonymous(start + sum(piece.size for piece in pieces), advise=False, spare=spare)
    base = _address(memory)
    skipped = (largest.piece.offset - base - largest.begin) % _HUGE_PAGE if spare else 0
    base += skipped
    to_read: list[tuple[int, Piece]] = []
    for run in runs:
        is_mapped = run.last > run.first and _map(base, run, fds[run.piece.file])
        to_read.extend(run.ends() if is_mapped else [(run.begin, run.piece)])
    if sum(piece.size for _, piece in to_read) >= _HUGE_BYTES:
        _advise(memory)
    view = memoryview(memory)[skipped:]
    for place, piece in to_read:
        read_at(piece, view[place : place + piece.size], fds[piece.file])
    return memory, skipped + start


def whole(file: Path, size: int, fd: int) -> memoryview:
    """Return the first `size` bytes of an open file, at least one, as memory that begins on a page, as `lay_out` does."""
    memory, start = lay_out([Piece(file, 0, size)], PAGE, {file: fd})
    return memoryview(memory)[start : start + size]


def fetch(file: Path, memory: memoryview) -> None:
    """Wait until a part of what `whole` gave, from a page on, is in memory, past Python's lock.

    Raises LoadError if the file cannot be read: who touches a page that cannot be had is ended by the system.
    """
    if sys.platform == "linux" and _madvise(_address(memory), len(memory), _POPULATE_READ):
        if ctypes.get_errno() != errno.EINVAL:  # which says that the system is too old
            raise LoadError(f"{file}: reading failed: {os.strerror(errno.EIO)}")


def anonymous(size: int, *, advise: bool = True, spare: int = 0) -> mmap.mmap:
    """Return fresh memory of `size` bytes, at least one, and addresses for some to spare; with `advise` and where it is large, made of huge pages.

    Raises LoadError if the system has none left, or grants no more mappings.
    """
    try:
        memory = mmap.mmap(-1, size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise LoadError(f"there is no room for a weight of {size / 1e6:.1f} MB: {error.strerror}") from error
    if advise and size >= _HUGE_BYTES:
        _advise(memory)
    return memory


def read_at(piece: Piece, out: memoryview, fd: int) -> None:
    """Read the piece into `out`, which has its size, past Python's lock and without mapping the file.

    Raises LoadError if the file ends early or cannot be read.
    """
    done = 0
    while done < piece.size:
        try:
            count = os.preadv(fd, [out[done : done + CHUNK_BYTES]], piece.offset + done)
        except OSError as error:
            raise LoadError(f"{piece.file}: reading failed: {error.strerror}") from error
        if not count:
            place = piece.offset + done
            raise LoadError(
                f"{piece.file}: the file ends at byte {place}; it was longer when its header was read"
            )
        done += count


def _address(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _advise(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)


def _plan(pieces: Sequence[Piece], alignment: int) -> tuple[int, list[Run]]:
    """Return where the first byte goes, and the runs."""
    joined = list(_joined(pieces))
    start = _best_start(joined, alignment)
    stop = start + sum(piece.size for piece in pieces)
    runs = []
    for place, piece in joined:
        begin, end = start + place, start + place + piece.size
        # Nothing else lives in the first and in the last page of the memory, so they may be mapped in part.
        first = _floor(begin) if begin == start else -_floor(-begin)
        last = -_floor(-end) if end == stop else _floor(end)
        is_aligned = (piece.offset - begin) % PAGE == 0
        if not is_aligned or last - first < MIN_MAPPED_BYTES:
            first = last = begin
        runs.append(Run(piece, begin, first, last))
    return start, runs


def _joined(pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
    """Join pieces that follow one another in the file already; yield each with its place in the result."""
    place = 0
    current: Piece | None = None
    for piece in pieces:
        if current and current.file == piece.file and current.offset + current.size == piece.offset:
            current = current._replace(size=current.size + piece.size)
            continue
        if current:
            yield place, current
            place += current.size
        current = piece
    if current:
        yield place, current


def _best_start(pieces: Sequence[tuple[int, Piece]], alignment: int) -> int:
    """Return the place in the first page at which most bytes can be mapped."""
    votes: dict[int, int] = {}
    for place, piece in pieces:
        start = (piece.offset - place) % PAGE
        if piece.size >= MIN_MAPPED_BYTES and start % alignment == 0:
            votes[start] = votes.get(start, 0) + piece.size
    return max(votes, key=lambda start: votes[start], default=0)


def _floor(place: int) -> int:
    return place // PAGE * PAGE


def _map(base: int, run: Run, fd: int) -> bool:
    """Map the file's pages over the reserved ones; say whether the system allowed it."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    offset = run.piece.offset + run.first - run.begin
    return bool(_mmap(base + run.first, run.last - run.first, protection, flags, fd, offset) != _FAILED)
