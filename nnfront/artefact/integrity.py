# SPDX-License-Identifier: Apache-2.0
"""Whether a file is the one that was written: a SHA-256 that names its content, and CRC-32s of its blocks that are quick to check.

The CRC-32s are what a load checks by default: of the pages that the weights then are, so that nothing else can be used than what was checked. One finds every damage of up to
32 bits in a row and misses one in four billion of the others. In C (`c/crc32.c`) they take what reading memory takes, 13 GB/s on one core of a Xeon, where zlib's do 4.8 and SHA-256
1.8 (measured November 2026). Neither tells who wrote a file: whoever can change it can change the hash beside it.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from nnfront.files import Folder
from nnfront.weights.mapped_memory import Piece, fetch, read_at

BLOCK_BYTES = 64 << 20
"""Bytes under one CRC-32: small enough for all cores to have some, large enough for the list to stay short."""
_READ_BYTES = 1 << 20  # stays in the cache of a core between reading and hashing
_FETCH_BYTES = 4 << 20  # 0.3 ms: what a thread works on between two looks at Python's lock
_THREADS = 8  # more than that, and the memory is the limit


def _fastest_crc32() -> Callable[[Buffer, int], int]:
    """The extension's, where it was built and the processor has the instructions."""
    try:
        native = importlib.import_module("nnfront.artefact.native")
    except ImportError:
        return zlib.crc32
    found: Callable[[Buffer, int], int] = getattr(native, "crc32", zlib.crc32)
    return found


Buffer: TypeAlias = bytes | memoryview
crc32 = _fastest_crc32()


@dataclass(frozen=True, slots=True)
class Digest:
    """What is known of a file's content: its size, its SHA-256 in hex, and the CRC-32 of each block of BLOCK_BYTES."""

    size_bytes: int
    sha256: str
    crc32: tuple[int, ...]


def digest_of(data: bytes) -> Digest:
    """Return the digest of a file that holds these bytes."""
    blocks = range(0, len(data), BLOCK_BYTES)
    crcs = tuple(crc32(data[begin : begin + BLOCK_BYTES], 0) for begin in blocks)
    return Digest(len(data), hashlib.sha256(data).hexdigest(), crcs)


def digest_files(folder: Folder, names: Sequence[str]) -> list[Digest]:
    """Read files of a folder and return their digests, several files at once. Raises LoadError if one cannot be read."""
    with ThreadPoolExecutor(_threads(len(names))) as pool:
        return list(pool.map(lambda name: _digest_file(folder, name), names))


def comparing_blocks(
    files: Sequence[tuple[Path, memoryview, Digest]],
) -> Callable[[], list[tuple[str, int]]]:
    """Begin to compare files, mapped whole, with their CRC-32s, in threads that leave Python's lock to others; the files must have their sizes.

    What is returned waits for them, and gives name and offset of each block whose bytes are not those that were written; it raises
    LoadError if a file cannot be read.
    """
    pieces = [
        (file, begin, memory[begin : begin + BLOCK_BYTES], crc)
        for file, memory, digest in files
        for begin, crc in zip(range(0, digest.size_bytes, BLOCK_BYTES), digest.crc32, strict=True)
    ]
    pool = ThreadPoolExecutor(_threads(len(pieces)))
    crcs = pool.map(lambda piece: _crc_of(piece[0], piece[2]), pieces)
    pool.shutdown(wait=False)  # it ends when all are done

    def damaged() -> list[tuple[str, int]]:
        found = zip(pieces, crcs, strict=True)
        return [(file.name, begin) for (file, begin, _, expected), crc in found if crc != expected]

    return damaged


def _threads(count: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(count, cores, _THREADS), 1)


def _digest_file(folder: Folder, name: str) -> Digest:
    sha, crcs, size = hashlib.sha256(), [], os.fstat(folder.open(name)).st_size
    for begin in range(0, size, BLOCK_BYTES):
        crc = 0
        for block in _blocks(folder, name, begin, min(BLOCK_BYTES, size - begin)):
            sha.update(block)
            crc = crc32(block, crc)
        crcs.append(crc)
    return Digest(size, sha.hexdigest(), tuple(crcs))


def _crc_of(file: Path, memory: memoryview) -> int:
    crc = 0
    for begin in range(0, len(memory), _FETCH_BYTES):
        part = memory[begin : begin + _FETCH_BYTES]
        fetch(file, part)
        crc = crc32(part, crc)
    return crc


def _blocks(folder: Folder, name: str, first: int, size: int) -> Iterator[memoryview]:
    """Yield the bytes of a piece of a file, a little at a time; each is valid until the next is asked for."""
    buffer = memoryview(bytearray(min(size, _READ_BYTES)))
    for begin in range(first, first + size, _READ_BYTES):
        part = buffer[: min(_READ_BYTES, first + size - begin)]
        read_at(Piece(folder.path / name, begin, len(part)), part, folder.open(name))
        yield part
