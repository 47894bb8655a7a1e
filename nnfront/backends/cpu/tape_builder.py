# SPDX-License-Identifier: Apache-2.0
"""The rows of a tape, and the places of its values: what kernels write their calls with.

A call is a row of numbers: which kernel, which of its numbers are places, and the numbers, in the order of the table in `c/kernels.def`. A place is
bytes behind the begin of one of the memories that a sequence is given when it runs.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch

from nnfront.backends.cpu.extension import KERNELS, NATIVE, work_bytes
from nnfront.ir import OPS
from nnfront.lower import Run
from nnfront.memory.arena import Arena, Piece
from nnfront.memory.layout import Layer
from nnfront.state.layer import CacheLayer

# As `run_sequence` has them: numbers of a row, and the bits of a place that are its offset.
ROW, OFFSET_BITS = 2 + max(map(len, KERNELS.values()), default=0), 40


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes behind the begin of one of the memories of a call, or of a piece of it whose own place is found when all are known."""

    index: int
    offset: int = 0
    piece: Piece | None = None

    def __add__(self, count: int) -> Place:
        return Place(self.index, self.offset + count, self.piece)


# The first two memories of each call: none, and the memory of values that do not outlive it.
NOWHERE, MEMORY = Place(0), 1


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor in one piece, which may be a part of a larger one: then `whole` is where that is."""

    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    whole: Place | None = None

    @property
    def base(self) -> Place:
        return self.whole or self.place

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerValue:
    """A layer of a cache: what `decode_attention.places` says of it, the numbers too, stands among the memories from `first` on."""

    layer: CacheLayer | Layer
    first: int

    def place(self, index: int) -> Place:
        return Place(self.first + index)


class Refused(Exception):
    """The kernels in C are not for these operands; its text says why."""


def demand(is_right: bool, why: str) -> None:
    """Refuse operands of which this is not right."""
    if not is_right:
        raise Refused(why)


def demand_bfloat16(**operands: Value | None) -> None:
    """Refuse operands in another dtype, the first of them by its name."""
    for name, value in operands.items():
        demand(value is None or value.dtype == torch.bfloat16, f"{name} is {getattr(value, 'dtype', None)}")


@dataclass(frozen=True)
class Tape:
    """What calls do for operands of certain shapes: their rows, the bytes of memory that they need, and what they return in which slots."""

    rows: torch.Tensor
    size: int
    returned: Mapping[int, Value]

    def run(self, memories: Iterable[Any]) -> list[torch.Tensor]:
        """Run it; `memories` are those after the first two, before those of what it returns."""
        assert NATIVE is not None
        memory = torch.empty(self.size, dtype=torch.uint8) if self.size else None
        made = [torch.empty(value.shape, dtype=value.dtype) for value in self.returned.values()]
        NATIVE.run_sequence(self.rows, None, memory, *memories, *made)
        return made


@dataclass
class TapeBuilder:
    """Writes the rows of a tape and finds places for its values. `outlive` are the slots of values that it returns, and their memories.

    `any_size`: operands are asked about by their types alone, whatever their sizes are in a call.
    """

    threads: int
    outlive: Mapping[int, int]
    any_size: bool = False
    rows: list[list[int]] = field(default_factory=list)
    pieces: list[tuple[int, int, Piece]] = field(default_factory=list)  # those that rows name, and where
    returned: dict[int, Value] = field(default_factory=dict)
    arena: Arena = field(default_factory=Arena)

    def tape(self) -> Tape:
        size = self.arena.place()
        for row, column, piece in self.pieces:
            self.rows[row][column] += piece.offset
        self.pieces.clear()
        returned = {slot: self.returned[slot] for slot in self.outlive}
        rows = array("q", [number for row in self.rows for number in row])
        return Tape(torch.frombuffer(rows, dtype=torch.int64).view(-1, ROW), size, returned)

    def limit(self, is_right: bool, why: str) -> None:
        """Refuse operands of sizes of which this is not right."""
        demand(is_right or self.any_size, why)

    def limit_count(self, count: int, most: int | None, what: str) -> None:
        """Refuse none of something, and more than so many, if there is a limit."""
        limit = f"there are no {what}" if most is None else f"there are more than {most} {what}, or none"
        self.limit(0 < count and (most is None or count <= most), limit)

    def call(self, kernel: str, *given: int | float | Place | Value | None) -> None:
        """Add a call: numbers, then operands or where they lie, None for one that is absent. Where it works is found, unless it is given, for the time of the call."""
        names = KERNELS[kernel]
        if len(given) < len(names):
            at = names.index("work")
            work = self.take(work_bytes(kernel, dict(zip(names, given, strict=False))))
            self.release(work)
            given = *given[:at], work, *given[at:]
        assert len(given) == len(names)
        row = [list(KERNELS).index(kernel), 0]  # the second one: which of the others are places
        for x in given:
            if isinstance(x, int):
                row.append(x)
            elif isinstance(x, float):
                row += struct.unpack("<q", struct.pack("<d", x))
            else:
                place = NOWHERE if x is None else x.place if isinstance(x, Value) else x
                if place.piece is not None:
                    self.pieces.append((len(self.rows), len(row), place.piece))
                row[1] |= 1 << len(row) - 2
                row.append(place.index << OFFSET_BITS | place.offset)
        self.rows.append(row + [0] * (ROW - len(row)))

    def make(self, slot: int, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Value:
        """Find a place for what is to be in a slot."""
        if slot in self.outlive:
            self.returned[slot] = Value(Place(self.outlive[slot]), tuple(shape), dtype)
            return self.returned[slot]
        made = Value(NOWHERE, tuple(shape), dtype)
        return Value(self.take(made.nbytes), made.shape, dtype)

    def take(self, count: int) -> Place:
        return Place(MEMORY, piece=self.arena.take(count))

    def hold(self, place: Place) -> None:
        """Say that one more slot has the value at a place."""
        if place.piece is not None:
            self.arena.hold(place.piece)

    def release(self, place: Place) -> None:
        """Say that one slot less does."""
        if place.piece is not None:
            self.arena.release(place.piece)


Operand: TypeAlias = Any  # Value, LayerValue or None
Write: TypeAlias = Callable[..., Sequence[Operand]]
"""How the calls of a kernel are written: from the builder, the instruction and its operands to its results. It raises Refused for operands that it is not for."""


def attribute(run: Run, name: str) -> Any:
    """An attribute of an op's call, which may be at its default."""
    return run.attrs[name] if name in run.attrs else OPS[run.op].attributes[name]
