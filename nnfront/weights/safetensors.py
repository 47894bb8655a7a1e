# SPDX-License-Identifier: Apache-2.0
"""The safetensors header: read and checked in full before a byte of tensor data is touched.

    8 bytes     length N of the header, unsigned, little-endian
    N bytes     JSON object: name -> {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__": string -> string
    the rest    tensor data; offsets count from here; tensors follow one another without gap or overlap

Source: the format description of the safetensors project (README, "Format").
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from nnfront.errors import LoadError
from nnfront.files import Folder, parse_json, read_bytes, shown
from nnfront.weights.name_hints import shortened

MAX_HEADER_BYTES = 100_000_000
"""The limit that the reference implementation sets; a larger length is a broken file."""
MAX_TENSORS = 250_000
"""In one file: the largest mixtures of experts have 200,000 in all, each with a scale, and divide them among a hundred files."""

# File dtype -> (torch's name, bits). Torch has no name for the three that pack elements across bytes.
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
    "F4": ("float4", 4),
    "F6_E2M3": ("float6_e2m3", 6),
    "F6_E3M2": ("float6_e3m2", 6),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says about a tensor. `offset` counts bytes from the start of the file.

    `encoding` names how its bytes are to be read where the dtype does not say it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size_bytes: int
    encoding: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: the tensors in order of their data, the file's metadata, and where the data begins and ends."""

    file: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, Any]
    data_start: int
    data_end: int


class Invalid(Exception):
    """A header cannot be looked at any further."""


@contextmanager
def opened(file: Path, folder: Folder | None, kind: str) -> Iterator[tuple[int, int, list[str]]]:
    """Open a file, of a folder that may be open already: give it, its size, and a list for problems with its header. Raises LoadError behind the block that lists
    them all, with what has ended it, of a file that is not of a kind.
    """
    problems: list[str] = []
    try:
        home = folder or Folder(file.parent)  # which closes its files when it is gone
        fd = home.open(file.name)
        yield fd, os.fstat(fd).st_size, problems
    except Invalid as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"it cannot be read: {error.strerror or error}")
    except LoadError as error:
        problems.append(f"it cannot be read: {', '.join(error.details) or error.what}")
    if problems:
        raise LoadError(f"{file} is not {kind}", details=shortened([(line, line) for line in problems]))


def read_header(file: Path, *, headers_only: bool = False, folder: Folder | None = None) -> Header:
    """Read and check the header of one safetensors file; with `headers_only` the data may be missing from the file.

    `folder` is the file's, if it is open already. Raises LoadError that lists every problem found.
    """
    with opened(file, folder, "a valid safetensors file") as (fd, size, problems):
        length, fields = _read_fields(fd, size)
        header = _check_fields(file, 8 + length, fields, problems)
        if not headers_only:
            problems += length_problems(header, size)
    return header


def length_problems(header: Header, size_bytes: int) -> list[str]:
    """Say how the length of a file differs from what its header describes; nothing if it does not."""
    missing = header.data_end - size_bytes
    if missing > 0:
        return [f"the file is truncated: {size_bytes} bytes, but the header describes {header.data_end}"]
    if missing < 0:
        return [f"{-missing} bytes follow the last tensor: {size_bytes} bytes, but the header describes {header.data_end}"]  # fmt: skip
    return []


def _read_fields(fd: int, size: int) -> tuple[int, dict[str, Any]]:
    """Return the header's length and its JSON object."""
    if size < 8:
        raise Invalid(f"the file has {size} bytes; 8 bytes of header length are the least")
    length = int.from_bytes(read_bytes(fd, 0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise Invalid(f"the header length is {length} bytes; {MAX_HEADER_BYTES} are the most")
    if length > size - 8:
        raise Invalid(f"the header length is {length} bytes, but only {size - 8} follow")
    try:
        fields = parse_json(read_bytes(fd, 8, length), is_strict=True)
    except ValueError as error:
        raise Invalid(f"the header is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Invalid("the header is not a JSON object")
    if len(fields) > MAX_TENSORS:
        raise Invalid(f"the header describes {len(fields)} tensors; {MAX_TENSORS} are the most")
    return length, fields


def _check_fields(file: Path, data_start: int, fields: dict[str, Any], problems: list[str]) -> Header:
    """Turn the JSON object into a header; add a line to `problems` for whatever is wrong in it."""
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.append("__metadata__ must be an object of strings")
        metadata = {}
    infos = []
    for name, entry in fields.items():
        info = _check_entry(file, data_start, name, entry)
        if isinstance(info, str):
            problems.append(f"tensor {shown(name)}: {info}")
        else:
            infos.append(info)
    # An empty tensor sits where the next one begins, so the size decides between equal offsets.
    infos.sort(key=lambda info: (info.offset, info.size_bytes))
    end = data_start
    if not problems:  # an entry left out would look like a gap
        for info in infos:
            if info.offset != end:
                kind = "overlaps the tensor before it" if info.offset < end else "leaves a gap before it"
                problems.append(
                    f"tensor {info.name!r}: {kind}: its data begins at {info.offset - data_start}, expected {end - data_start}"
                )
            end = max(end, info.offset + info.size_bytes)
    return Header(file, {info.name: info for info in infos}, metadata, data_start, end)


def _check_entry(file: Path, data_start: int, name: str, entry: Any) -> TensorInfo | str:
    """Return the tensor's info, or what is wrong with the entry."""
    if not name.isprintable():
        return "the name holds characters that cannot be printed"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return "needs dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"unknown dtype {shown(dtype)}"
    if not _are_sizes(shape):
        return f"the shape {shown(shape)} must be a list of sizes"
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"the data_offsets {shown(offsets)} must be [begin, end]"
    torch_dtype, bits = DTYPES[dtype]
    begin, end = offsets
    expected = math.prod(shape) * bits
    if expected != (end - begin) * 8:
        takes = Decimal(expected) / 8  # of a file dtype's sizes a float cannot hold all products
        return f"{dtype} {shown(shape)} takes {takes:g} bytes, but its data_offsets span {end - begin}"
    return TensorInfo(name, torch_dtype, tuple(shape), file, data_start + begin, end - begin)


def _are_sizes(value: Any) -> bool:
    """Whether this is a list of at most 64 sizes, as many axes as numpy allows."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(size) is int and 0 <= size < 2**63 for size in value)
    )
