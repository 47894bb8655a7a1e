# SPDX-License-Identifier: Apache-2.0
"""What the caches of a method have in common: layers, one length for each sequence, and ways back.

There are two: `ContiguousCache`, whose sequences have a buffer each (`nnfront.state.contiguous`), and `PagedCache`, whose sequences share a pool
of pages (`nnfront.state.paged`). A cache belongs to one caller. Tokens are written in place.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch

from nnfront.errors import RunError
from nnfront.lower import StateLayerType, StateType
from nnfront.state.fixed import FixedStorage, Saved
from nnfront.state.layer import CacheLayer, Rows
from nnfront.state.lengths import SequenceLengths
from nnfront.state.type import layout
from nnfront.state.use import Journal, Use

# Bytes that a base counts (`Storage`): what is moved by a number of them is as aligned as it was.
UNIT = 16


@lru_cache(maxsize=1024)
def _interned(key: tuple[object, ...]) -> object:
    return object()


def bases_of_tokens(layer: CacheLayer) -> int:
    """How many of a layer's bases are of its tokens; those of whole states follow."""
    return max(4, len(layer.placed.all))


def _addresses(layer: CacheLayer) -> tuple[int | None, ...]:
    tokens = [part.data_ptr() for part in layer.placed.all] or [0]
    states = [number for rows in layer.settled() for number in (rows.data_ptr(), None)]
    return (*(*tokens, *tokens, 0, 0)[: bases_of_tokens(layer)], *states)


@dataclass(frozen=True, slots=True)
class Mark:
    """What `restore` goes back to as long as the call goes on: how many tokens there were, and what of the journal was written then."""

    lengths: SequenceLengths
    journal: Journal
    position: int
    layers: tuple[CacheLayer, ...]

    @property
    def rows(self) -> tuple[Rows, ...]:
        """Of which sequences of which layers it is."""
        return tuple(layer.rows for layer in self.layers)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Snapshot:
    """What `restore` goes back to at any time. `nbytes` are those of the copies that it holds, of what cutting tokens off does not bring back."""

    lengths: SequenceLengths
    saved: tuple[Saved, ...]
    rows: tuple[Rows, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds."""
        return sum(each.nbytes for each in self.saved)


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """What layers keep of whole sequences, as it was behind so many tokens of each. Sequences of any cache of this layout can go on from it."""

    lengths: tuple[int, ...]
    buffers: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds."""
        return sum(buffer.nbytes for buffer in self.buffers)


class Cache(Sequence[CacheLayer]):
    """All layers of a cache. Make one with `session.make_cache(...)`.

    `batch` sequences of up to `max_seq` tokens. Iterates over its layers.
    """

    __slots__ = (
        *("_addresses", "_arrangement", "_layers", "_snapshot"),
        *("batch", "layout", "max_seq", "type", "use"),
    )

    def __init__(self, type: StateType, layers: Sequence[CacheLayer], use: Use) -> None:
        """`use` is that of its layers, and of every cache whose memory this one shares."""
        self.type = type
        self.use = use
        self.layout = layout(type)
        self.batch: int = layers[0].batch if layers else 0
        self.max_seq: int = layers[0].max_seq if layers else 0
        self._layers = tuple(layers)
        self._arrangement: object = None
        self._addresses: tuple[tuple[int | None, ...], ...] | None = None
        self._snapshot: weakref.ref[Snapshot] | None = None

    @property
    def arrangement(self) -> object:
        """The same object for another cache only if what its layers keep lies in the same way, wherever that is."""
        if self._arrangement is None:
            tensors = [tensor for layer in self for tensor in (*layer.placed.all, *layer.settled())]
            found = [(t.data_ptr() % UNIT, t.shape[1:], t.stride(), t.dtype) for t in tensors]
            tables = self.page_tables()
            order = [*tables]
            read = [None if layer.table_key is None else order.index(layer.table_key) for layer in self]
            columns = [table.shape[1] for table in tables.values()]
            self._arrangement = _interned((self.layout, self.max_seq, *found, *read, *columns))
        return self._arrangement

    @property
    def addresses(self) -> tuple[tuple[int | None, ...], ...]:
        """Where each layer lies, in the order of its bases: buffers of tokens and their scales, a single one twice, and each whole state.

        Behind a state is a None: in its place bases say how many rows of a graph are nobody's.
        """
        if self._addresses is None:
            self._addresses = tuple(map(_addresses, self))
        return self._addresses

    def page_tables(self) -> dict[Hashable, torch.Tensor]:
        """Its tables of pages, in an order that stays the same, each under what layers have as `table_key`: int32 [batch, pages at most]."""
        return {}

    def __getitem__(self, index: Any) -> Any:
        return self._layers[index]

    def __iter__(self) -> Iterator[CacheLayer]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def lengths(self) -> list[int]:
        """How many tokens each sequence has."""
        return list(self._lengths.values)

    def length(self, sequence: int = 0) -> int:
        """How many tokens a sequence has."""
        return self._lengths.values[sequence]

    @property
    def _lengths(self) -> SequenceLengths:
        return self._layers[0].lengths if self._layers else SequenceLengths(())

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size of all buffers in bytes."""

    @abstractmethod
    def clone(self) -> Self:
        """A copy with buffers of its own."""

    def fork(self, sequences: int | Sequence[int]) -> Self:
        """A cache whose sequences begin with the tokens of these, one each, in this order; a sequence may occur more than once.

        What is appended to either afterwards the other does not see. Raises RunError for a sequence that the cache does not have.
        """
        chosen = (sequences,) if isinstance(sequences, int) else tuple(sequences)
        for i in chosen:
            if not 0 <= i < self.batch:
                raise RunError(f"sequence {i} is not in a cache of {self.batch} sequences")
        if not chosen:
            raise RunError("fork needs at least one sequence")
        return self._fork(chosen)

    @abstractmethod
    def _fork(self, sequences: tuple[int, ...]) -> Self: ...

    def rows(self, first: int, stop: int | None = None) -> Self:
        """Some sequences in a row, `first` alone by default, as a cache that shares their storage and lengths.

        Raises RunError for sequences that the cache does not have.
        """
        stop = first + 1 if stop is None else stop
        if not 0 <= first < stop <= self.batch:
            raise RunError(f"rows {first} to {stop} are not in a cache of {self.batch} sequences")
        return self._with([layer.part(first, stop - first) for layer in self._layers], self.use)

    def _with(self, layers: Sequence[CacheLayer], use: Use) -> Self:
        """The cache of other layers; those of one type share theirs again."""
        types: dict[int, StateLayerType] = {}
        shared = tuple(
            types.setdefault(id(old), new.type) for old, new in zip(self.type.layers, layers, strict=True)
        )
        return type(self)(StateType(shared), layers, use)

    def _lengths_of(self, sequences: Sequence[int]) -> list[SequenceLengths]:
        """The lengths of some sequences in each layer: one object where the layers have one.

        Not remembered by the old ones: these may stay for long, and what forks derive from theirs would stay with them.
        """
        old = {id(layer.lengths): layer.lengths for layer in self._layers}
        new = {key: x.like(tuple(x.values[i] for i in sequences)) for key, x in old.items()}
        return [new[id(layer.lengths)] for layer in self._layers]

    def reset(self) -> None:
        """Forget all tokens."""
        self._empty(self._lengths.like((0,) * self.batch))

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` tokens of each sequence.

        Raises RunError for a negative length, if a window has dropped tokens that the sequence would see again, and for what a layer keeps
        of a whole sequence, such as the state of a recurrence: that goes back to the last snapshot, if it was taken there, or to the beginning.
        """
        if length < 0:
            raise RunError(
                f"the cache cannot be cut to {length} tokens",
                help="give how many tokens to keep; cache.reset() keeps none",
            )
        lengths = self._lengths
        wanted = lengths.like(tuple(min(n, length) for n in lengths.values))
        snapshot = self._snapshot() if self._snapshot is not None else None
        if snapshot is not None and snapshot.lengths.values == wanted.values != lengths.values:
            self.restore(snapshot)
        else:
            self._cut(wanted)

    def uneven(self) -> str | None:
        """Say which layer, the first one, does not hold as many tokens of each sequence as layer 0; None if all do."""
        lengths = self._lengths
        for i, layer in enumerate(self._layers):
            if layer.lengths.values != lengths.values:
                return f"layer {i} holds {list(layer.lengths.values)}"
            for name, storage in layer.fixed.items():
                if storage.lengths.values != lengths.values:
                    return f"layer {i} holds {list(storage.lengths.values)} in {name!r}"
        return None

    def mark(self) -> Mark:
        """What `restore` goes back to after a call that failed half way, or before the next call."""
        self._settle()
        lengths, journal = self._lengths, self.use.journal
        if journal is None:
            journal = self.use.journal = Journal(lengths)
        return Mark(lengths, journal, len(journal.entries), self._layers)

    def share(self, layers: Iterable[int]) -> None:
        """Say which layers are read again in the call that has begun, behind the attention that appends to them."""
        self.use.shared |= {id(self._layers[i]) for i in layers}

    def _settle(self) -> None:
        """Give back what no token sees any more, as a call gives back nothing until it is over."""

    def snapshot(self) -> Snapshot:
        """What `restore` goes back to at any time: a copy of what cutting tokens off does not bring back, `nbytes` large."""
        saved = tuple(each for layer in self._layers for each in layer.save())
        snapshot = Snapshot(self._lengths, (*saved, *self._save()), self._rows)
        self._snapshot = weakref.ref(snapshot)
        return snapshot

    @property
    def _rows(self) -> tuple[Rows, ...]:
        return tuple(layer.rows for layer in self._layers)

    def _save(self) -> Iterable[Saved]:
        """What the cache itself has to copy."""
        return ()

    @property
    def _fixed(self) -> Iterator[FixedStorage]:
        return (storage for layer in self._layers for storage in layer.fixed.values())

    def states(self) -> States:
        """What layers keep of whole sequences now: no copy where that is all they keep, else one of these rows."""
        return States(self._lengths.values, tuple(storage.read() for storage in self._fixed))

    def go_on_from(self, states: States) -> None:
        """Have each sequence as it was behind the tokens that `states` are of, which it begins with: tokens behind them are forgotten.

        Raises RunError, with nothing changed, where a window has dropped tokens that a sequence would see again.
        """
        assert len(states.lengths) == self.batch
        lengths = self._lengths.like(states.lengths)
        self._require_kept(lengths)
        self._set(lengths)
        for storage, rows in zip(self._fixed, states.buffers, strict=True):
            storage.put_back(rows)

    def restore(self, to: Mark | Snapshot) -> None:
        """Go back to a mark or a snapshot of this cache: what was appended since is forgotten, in every layer.

        Raises RunError for one of another cache, for a snapshot at more tokens than the cache was cut to since, and as `truncate` does for a
        mark before a call that has succeeded.
        """
        if to.rows != self._rows:
            kind = type(to).__name__.lower()
            raise RunError(
                f"the {kind} is of another cache",
                details=[
                    f"got one of a cache with {list(to.lengths.values)} tokens",
                    f"expected one that {self!r} has taken itself",
                ],
                help=f"a fork, a clone and rows of a cache take their own: mark = cache.{kind}()",
            )
        if isinstance(to, Snapshot):
            if not all(each.is_there() for each in to.saved):
                raise RunError(
                    "the cache cannot go back to its snapshot",
                    details=[
                        f"the snapshot holds {list(to.lengths.values)} tokens, and the cache has been cut to fewer since"
                    ],
                    help="keep a clone: cache.clone()",
                )
            for each in to.saved:
                each.put_back()
            self._set(to.lengths)
        elif to.journal is self.use.journal:
            to.journal.undo(to.position)
            if not to.position:
                self.use.journal = None
                self.use.chunks.clear()
            self._set(to.lengths)
        else:
            self._cut(to.lengths)

    def _cut(self, lengths: SequenceLengths) -> None:
        for i, layer in enumerate(self._layers):
            for now, wanted in zip(layer.lengths.values, lengths.values, strict=True):
                if layer.fixed and 0 < wanted < now:
                    raise self._no_way_back(i, now, wanted)
        self._require_kept(lengths)
        self._empty(lengths)

    def _require_kept(self, lengths: SequenceLengths) -> None:
        """Raise RunError where a window has dropped what a sequence would see again behind so many tokens."""
        for layer in self._layers:
            for row, (now, wanted) in enumerate(zip(layer.lengths.values, lengths.values, strict=True)):
                if wanted < now and not layer.keeps(row, wanted):
                    raise RunError(
                        f"the cache cannot be cut to {wanted} tokens: it has {now}, and a window keeps only the last {layer.window}",
                        help="call cache.reset() and give the tokens again",
                    )

    def _no_way_back(self, layer: int, now: int, wanted: int) -> RunError:
        snapshot = self._snapshot() if self._snapshot is not None else None
        last = (
            "there is no snapshot of it"
            if snapshot is None
            else f"its last snapshot holds {list(snapshot.lengths.values)}"
        )
        names = ", ".join(repr(name) for name in self._layers[layer].fixed)
        return RunError(
            f"the cache cannot be cut to {wanted} tokens: it has {now}, and layer {layer} keeps {names} only as of the last one",
            details=[last],
            help="mark = cache.snapshot() where it may have to go back to, and cache.restore(mark)",
        )

    def _empty(self, lengths: SequenceLengths) -> None:
        self._set(lengths)
        for storage in self._fixed:
            storage.clear()

    def _set(self, lengths: SequenceLengths) -> None:
        for layer in self._layers:
            layer.set_lengths(lengths)

    def __repr__(self) -> str:
        return (
            f"<Cache {len(self)} layers, batch {self.batch}, max_seq {self.max_seq}, lengths {self.lengths}>"
        )
