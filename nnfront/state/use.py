# SPDX-License-Identifier: Apache-2.0
"""The call that uses a cache now, and how to undo what it has written over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias
from weakref import WeakSet

import torch

from nnfront.state.lengths import SequenceLengths

# What is stored of some tokens in each buffer, and their positions, while a chunk of tokens attends that turns a ring over.
Chunk: TypeAlias = tuple[tuple[torch.Tensor, ...], torch.Tensor]


@dataclass(slots=True)
class Journal:
    """How to undo what was written over since a mark, in the order in which it was; `lengths` are those of then."""

    lengths: SequenceLengths
    entries: list[Callable[[], None]] = field(default_factory=list)

    def undo(self, position: int) -> None:
        """Undo all behind a position, the last one first."""
        while len(self.entries) > position:
            self.entries.pop()()


class Use:
    """The call that uses a cache now, one at a time; caches that share memory have one of these together.

    `journal` is kept from a mark on, until the call ends. `chunks` are, by the ids of their layers, that of the layer at work, if it needs
    one, and those of the layers that are read again later in the call, whose ids are `shared`.
    """

    __slots__ = ("_lock", "chunks", "journal", "method", "shared")

    def __init__(self) -> None:
        self._lock = Lock()
        self.method = ""
        self.journal: Journal | None = None
        self.chunks: dict[int, Chunk] = {}
        self.shared: frozenset[int] = frozenset()

    def begin(self, method: str) -> bool:
        """Take it for a call of a method; False if another call has it."""
        if not self._lock.acquire(blocking=False):
            return False
        self.method = method
        self.journal = None
        return True

    def end(self) -> None:
        """Give it back."""
        self.journal, self.shared = None, frozenset()
        self.chunks.clear()
        self._lock.release()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let other calls use it, one after the other, before the one that has it goes on. They are to write other sequences than that one."""
        method, journal, chunks, shared = self.method, self.journal, self.chunks, self.shared
        self.chunks = {}
        self.end()
        try:
            yield
        finally:
            is_free = self.begin(method)
            assert is_free, "a cache that is set aside belongs to one thread"
            self.journal, self.chunks, self.shared = journal, chunks, shared

    def keep(self, layer: int, chunk: Chunk) -> None:
        """Keep a layer's chunk, and of the others those that are read again."""
        self.chunks = {id: kept for id, kept in self.chunks.items() if id in self.shared} | {layer: chunk}


@dataclass(slots=True, weakref_slot=True, eq=False)
class Cuts:
    """How few tokens each sequence has had since something began to look."""

    lowest: list[int]


class LayerState:
    """What all views of a layer, or of one of its buffers, share: how many tokens there are, and the call that uses it.

    `newest` is how many each sequence had at most where some have been cut off since, for what lies in a ring.
    """

    __slots__ = ("_cuts", "lengths", "newest", "use")

    def __init__(self, lengths: SequenceLengths, use: Use) -> None:
        self.lengths = lengths
        self.use = use
        self.newest: tuple[int, ...] | None = None
        self._cuts: WeakSet[Cuts] = WeakSet()

    def cuts(self) -> Cuts:
        """From now on, to how many tokens each sequence is cut."""
        cuts = Cuts(list(self.lengths.values))
        self._cuts.add(cuts)
        return cuts

    def cut(self, first: int, lengths: SequenceLengths) -> None:
        """Say how many tokens some sequences have from now on, never more than they had."""
        before = self.lengths.values
        self.lengths = self.lengths.replaced(first, lengths)
        now = self.lengths.values
        if now != before:
            newest = map(max, before, self.newest or before)
            self.newest = tuple(n if kept else 0 for n, kept in zip(newest, now, strict=True))
            for cuts in self._cuts:
                cuts.lowest = list(map(min, cuts.lowest, now))
