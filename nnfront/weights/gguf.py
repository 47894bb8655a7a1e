# SPDX-License-Identifier: Apache-2.0
"""The container of GGUF files: metadata, and where the bytes of each tensor are. Nothing is read but the header, and all that it says is checked.

A file is magic, version, two counts; pairs of key and typed value; for each tensor its name, sizes from the innermost on, type and offset; then the data, one tensor after
another, each at a multiple of the alignment. Numbers are little-endian; texts and lists begin with their length in 64 bits.
Tensors whose type packs numbers into blocks are given as bytes: `[..., blocks * bytes of one]` of uint8, with the type's name as `encoding`.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from nnfront.errors import LoadError
from nnfront.files import Folder, read_bytes, shown
from nnfront.weights.safetensors import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    Header,
    Invalid,
    TensorInfo,
    length_problems,
    opened,
)

MAGIC = b"GGUF"
MAX_PAIRS, MAX_ITEMS, MAX_AXES = 1 << 16, 1 << 24, 4
_CHUNK_BYTES = 1 << 20


class BlockType(NamedTuple):
    """A type of tensors: its name, how many numbers a block has and how many bytes; `dtype` if a block is one number."""

    name: str
    numbers: int
    size_bytes: int
    dtype: str = ""


TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, "float32"),
    1: BlockType("F16", 1, 2, "float16"),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    28: BlockType("F64", 1, 8, "float64"),
    30: BlockType("BF16", 1, 2, "bfloat16"),
    39: BlockType("MXFP4", 32, 17),
}
"""By the number in a file."""

_UNREAD = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Names of types that are not read, for messages."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _TEXT, _LIST = 7, 8, 9


class _Reader:
    """Reads a file from its start, no more of it than a header may have."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self.at = 0
        self._begin, self._data = 0, b""

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > self.size:
            raise Invalid(f"the file is truncated: {self.size} bytes, and its header goes on")
        if end > MAX_HEADER_BYTES:
            raise Invalid(f"the header has more than {MAX_HEADER_BYTES} bytes")
        if end > self._begin + len(self._data):
            self._begin = self.at
            self._data = read_bytes(self.fd, self.at, min(max(count, _CHUNK_BYTES), self.size - self.at))
            if len(self._data) < count:
                raise Invalid(f"the file is truncated: its header goes on after {self.size} bytes")
        self.at = end
        return self._data[end - count - self._begin : end - self._begin]

    def number(self, kind: str) -> Any:
        """The next number, of a kind of `struct`."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str:
        """The next text; bytes that are no UTF-8 become characters of their own, as they may in a vocabulary."""
        size = int.from_bytes(self.take(8), "little")
        return self.take(size).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        """The next value of a kind of GGUF's."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _BOOL:
            return bool(self.number("B"))
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            raise Invalid(f"a value is of type {kind}, which there is not")
        inner, count = self.number("I"), self.number("Q")
        if count > MAX_ITEMS:
            raise Invalid(f"a list has {count} items; {MAX_ITEMS} are the most")
        if inner in _NUMBERS:
            item = _NUMBERS[inner]
            return list(struct.unpack(f"<{count}{item}", self.take(count * struct.calcsize(f"<{item}"))))
        if inner not in (_BOOL, _TEXT):
            raise Invalid(f"a list is of items of type {inner}, which is not read")
        return [self.value(inner) for _ in range(count)]


def is_gguf(folder: Folder, name: str) -> bool:
    """Whether a file of a folder is named or begins as one; not if it cannot be read."""
    try:
        return name.endswith(".gguf") or read_bytes(folder.open(name), 0, 4) == MAGIC
    except (LoadError, OSError):
        return False


def read_gguf(file: Path, *, headers_only: bool = False, folder: Folder | None = None) -> Header:
    """Read and check the header of one GGUF file; with `headers_only` the data may be missing from the file.

    `folder` is the file's, if it is open already. Raises LoadError that lists the problems found.
    """
    with opened(file, folder, "a GGUF file that can be read") as (fd, size, problems):
        header = _header(file, _Reader(fd, size), problems)
        if not headers_only and not problems:
            problems += [p for p in length_problems(header, size) if "follow" not in p]  # it may be padded
    return header


def _header(file: Path, reader: _Reader, problems: list[str]) -> Header:
    if reader.take(4) != MAGIC:
        raise Invalid("it does not begin with GGUF")
    version = reader.number("I")
    if version not in (2, 3):
        raise Invalid(f"its version is {version}, expected 2 or 3 (little-endian)")
    tensors, pairs = reader.number("Q"), reader.number("Q")
    if tensors > MAX_TENSORS or pairs > MAX_PAIRS:
        raise Invalid(
            f"it says {tensors} tensors and {pairs} pairs of metadata; {MAX_TENSORS} and {MAX_PAIRS} are the most"
        )
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = reader.text()
        if key in metadata:
            raise Invalid(f"the key {shown(key)} occurs twice")
        metadata[key] = reader.value(reader.number("I"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment % 8 or alignment > 1 << 20:
        raise Invalid(f"general.alignment is {shown(alignment)}, expected a multiple of 8")
    entries = [_entry(reader, problems) for _ in range(tensors)]
    start = -(-reader.at // alignment) * alignment
    infos: dict[str, TensorInfo] = {}
    end = start
    for name, kind, shape, offset in sorted(entries, key=lambda entry: entry[3]):
        if kind is None:
            continue
        blocks = (
            (*shape[:-1], shape[-1] // kind.numbers * (1 if kind.dtype else kind.size_bytes)) if shape else ()
        )
        size = math.prod(shape) // kind.numbers * kind.size_bytes
        expected = -(-(end - start) // alignment) * alignment
        if offset != expected and not problems:
            problems.append(f"tensor {shown(name)}: its data begin at {offset}, expected {expected}")
        if name in infos:
            problems.append(f"tensor {shown(name)} occurs twice")
        encoding = "" if kind.dtype else kind.name
        infos[name] = TensorInfo(name, kind.dtype or "uint8", blocks, file, start + offset, size, encoding)
        end = start + offset + size
    return Header(file, infos, metadata, start, end)


def _entry(reader: _Reader, problems: list[str]) -> tuple[str, BlockType | None, tuple[int, ...], int]:
    """Name, type, sizes from the outermost on, and offset of the next tensor; no type if something is wrong with it."""
    name, axes = reader.text(), reader.number("I")
    if axes > MAX_AXES:
        raise Invalid(f"tensor {shown(name)} has {axes} axes; {MAX_AXES} are the most")
    sizes = tuple(reader.number("Q") for _ in range(axes))[::-1]
    number, offset = reader.number("I"), reader.number("Q")
    kind, problem = TYPES.get(number), ""
    if not name.isprintable():
        problem = "the name holds characters that cannot be printed"
    elif kind is None:
        which = f"{number} ({_UNREAD[number]})" if number in _UNREAD else str(number)
        known = ", ".join(known.name for known in TYPES.values())
        problem = f"it is of type {which}, which is not read; those are {known}"
    elif math.prod(sizes) >= 2**63 or offset >= 2**63:
        problem = f"its sizes {shown(list(sizes))} at {offset} are more than a file can hold"
    elif sizes and sizes[-1] % kind.numbers:
        problem = f"its rows of {sizes[-1]} are no whole number of blocks of {kind.numbers} ({kind.name})"
    elif not sizes and kind.numbers > 1:
        problem = f"it has no axis, and {kind.name} has blocks"
    if problem:
        problems.append(f"tensor {shown(name)}: {problem}")
        return name, None, sizes, offset
    return name, kind, sizes, offset
