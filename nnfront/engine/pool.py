# SPDX-License-Identifier: Apache-2.0
"""Sequences that come and go, in one paged cache whose rows they are.

Rows that are to be computed in one call lie next to each other: where they do not, they change places with others, by their page numbers and what layers
keep of whole sequences. A sequence that others may begin with after its end keeps its pages, and no row.

Where layers keep states of whole sequences, tokens are taken back by states from before they were computed. What of them was drawn is computed again,
in the next call, beside what is computed there anyway: a copy of a row's states is all that it costs, where states behind each token
would be as many times what a call writes, whether they are wanted or not.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from nnfront.engine.changes import Change, Cut, Drop, Forget, Make, Remember, Save
from nnfront.engine.schedule import Limits
from nnfront.session import Session
from nnfront.state.cache import Cache, States
from nnfront.state.paged import Held, PagedCache
from nnfront.state.token_rows import TokenRows, can_be_rows

FILLER = -1
"""The number of rows of nobody's. One makes a single row two where kernels add up one row in another order than several."""
SHORT = 32
"""Tokens of a row of nobody's."""


def company(session: Session, count: int = 1) -> bool:
    """Whether a single sequence of a call of `count` tokens needs another row for its sums to have the order that those of several have."""
    return count == 1 and session.backend.adds_single_rows_otherwise


def text_cache(session: Session) -> str:
    """The argument of a language model's methods that is their cache: others, of a head that guesses, may take another."""
    arguments = session.program.methods["prefill"].arguments
    return next(argument.name for argument in arguments if argument.role == "state")


class Pool:
    """The cache of an engine; sequences are known by their number.

    A cache that is given, for as many sequences as there ever are and a row of nobody's besides if `company` says so, may be one without pages: there each sequence keeps its row.
    """

    def __init__(
        self,
        session: Session,
        limits: Limits,
        stored_as: str | None = None,
        given: Cache | None = None,
        *,
        argument: str | None = None,
    ) -> None:
        """`argument`: of the methods that take the cache; that of the texts themselves unless another is named."""
        self._session, self._limits, self._stored_as, self._given = session, limits, stored_as, given
        self._argument = argument or text_cache(session)
        self.reset()

    def reset(self) -> None:
        """Begin with an empty cache, whatever was in the one before."""
        limits = self._limits
        batch = limits.max_num_seqs + 2
        self._cache: Cache | None = None  # its memory may be needed
        self._views: dict[tuple[int, int], Cache] = {}
        self._row: dict[int, int] = {}
        self._held: dict[int, Held] = {}
        self._saved: dict[int, tuple[States, Held]] = {}
        self._before: dict[int, States] = {}
        self._adapter: dict[int, int] = {}
        if self._given is not None:
            self._cache, self._free = self._given, list(range(self._given.batch))
            self._given.reset()
            return
        self._cache = self._session.make_cache(
            self._argument,
            batch=batch,
            max_seq=limits.max_model_len,
            pages=limits.pages + 1,  # the filler's
            page_size=limits.page_size,
            stored_as=self._stored_as,
        )
        self._free = list(range(batch))
        self._row[FILLER] = self._free.pop()

    @property
    def cache(self) -> Cache:
        """The cache as it is now; another one after the next change."""
        assert self._cache is not None
        return self._cache

    @property
    def window(self) -> int | None:
        """The most tokens behind which a layer drops others, None if none does."""
        windows = [layer.window for layer in self.cache.type.layers if layer.window is not None]
        return max((window for window in windows if window < self._limits.max_model_len), default=None)

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep states of whole sequences."""
        return any(layer.per_sequence for layer in self.cache.type.layers)

    @property
    def snapshots(self) -> int | None:
        """For how many copies of a sequence's states there is room, which hold at most half of the pages; None if no sequence needs one to begin with another's tokens."""
        room = []
        if self.keeps_states:
            room.append(self._limits.snapshot_bytes // self._view(0, 1).states().nbytes)
        if self.window is not None:
            size = self._limits.page_size
            room.append(self._limits.pages // (2 * -(-(self.window + size) // size)))
        return min(room, default=None)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the copies that there are."""
        return sum(states.nbytes for states, _ in self._saved.values())

    def apply(self, changes: Sequence[Change]) -> None:
        """Do these, in this order."""
        for change in changes:
            match change:
                case Make(sequence, source, length, states, adapter):
                    self._row[sequence] = heapq.heappop(self._free)
                    self._adapter[sequence] = adapter
                    if source is not None:
                        self._begin(sequence, source, length, states)
                case Cut(sequence, length):
                    self._go_back(sequence, length)
                case Remember(sequence, length):
                    if (held := self._held.get(sequence)) is not None:
                        self._held[sequence] = held.cut(length)
                        continue
                    self._held[sequence] = self._paged(self.row(sequence)).hold(length)
                    self._give_back(sequence)
                case Drop(sequence):
                    if self._held.pop(sequence, None) is None:
                        self._give_back(sequence)
                case Save(number, sequence):
                    row = self._paged(self.row(sequence))
                    self._saved[number] = row.states(), row.hold(row.length(), only_windows=True)
                case Forget(number):
                    del self._saved[number]
        self._before.clear()

    def save(self, sequences: Iterable[int]) -> None:
        """Keep the states of sequences until the next changes, for those that are cut then."""
        if self.keeps_states:
            self._before.update((each, self.row(each).states()) for each in sequences if each != FILLER)

    def _begin(self, sequence: int, source: int, length: int, states: int | None) -> None:
        """Have a new sequence begin with tokens of another."""
        view = self._paged(self.row(sequence))
        held = self._held.get(source) or self._paged(self.row(source)).hold(length)
        if states is None:
            view.begin_with(held)
            view.truncate(length)
        else:
            saved, windows = self._saved[states]
            view.begin_with(held.with_windows_of(windows))
            view.go_on_from(saved)

    def _go_back(self, sequence: int, length: int) -> None:
        """Take back the last tokens of a sequence."""
        view = self.row(sequence)
        if (before := self._before.get(sequence)) is None:
            view.truncate(length)
        else:
            view.go_on_from(before)
        assert view.length() == length

    def _give_back(self, sequence: int) -> None:
        row = self._row.pop(sequence)
        del self._adapter[sequence]
        self._view(row, 1).reset()
        heapq.heappush(self._free, row)

    @staticmethod
    def _paged(view: Cache) -> PagedCache:
        assert isinstance(view, PagedCache)
        return view

    def adapter(self, sequence: int) -> int:
        """The number of a sequence's adapter, -1 for none; rows of nobody's have none."""
        return self._adapter.get(sequence, -1)

    def row(self, sequence: int) -> Cache:
        """One sequence."""
        return self._view(self._row[sequence], 1)

    def rows(self, sequences: Sequence[int], most: int, count: int = 1) -> list[tuple[list[int], Cache]]:
        """Some sequences in groups of up to so many, for a call of `count` tokens of each: who they are, in the order of the rows, and the rows.

        `FILLER` may be among them.
        """
        if not sequences:
            return []
        if self._given is not None:
            placed = self._as_they_lie(count)
        else:
            placed = self._together(sequences, most, count)
        return [
            (placed[i : i + most], self._view(i, min(most, len(placed) - i)))
            for i in range(0, len(placed), most)
        ]

    @property
    def can_be_rows(self) -> bool:
        """Whether tokens of sequences can be rows of one call."""
        return self._given is None and can_be_rows(self.cache)

    def token_rows(self, counts: Mapping[int, int]) -> Cache:
        """The next tokens of sequences, so many of each, a row for each token."""
        return TokenRows(self._paged(self.cache), [(self._row[s], count) for s, count in counts.items()])

    def keep_apart(self, sequences: Sequence[int], most: int) -> None:
        """Have some sequences in the first rows, so that calls of these, and of fewer of them, leave the others where they are."""
        if sequences:
            self._together(sequences, most, 1)

    def _as_they_lie(self, count: int) -> list[int]:
        """All rows; those of nobody's are computed as well, and are to stay short."""
        placed = [FILLER] * self.cache.batch
        for sequence, row in self._row.items():
            placed[row] = sequence
        for row, sequence in enumerate(placed):
            if sequence == FILLER and self._view(row, 1).length() + count > min(SHORT, self.cache.max_seq):
                self._view(row, 1).reset()
        return placed

    def _together(self, sequences: Sequence[int], most: int, count: int) -> list[int]:
        """Some sequences, in the first rows."""
        if len(sequences) % most == 1 and company(self._session, count):
            self.row(FILLER).reset()
            sequences = [*sequences, FILLER]
        if {self._row[s] for s in sequences} != set(range(len(sequences))):
            self._to_front(sequences)
        return sorted(sequences, key=self._row.__getitem__)

    def _to_front(self, sequences: Sequence[int]) -> None:
        wanted = {self._row[s] for s in sequences}
        holes = [row for row in range(len(wanted)) if row not in wanted]
        others = {}
        for hole, row in zip(holes, sorted(row for row in wanted if row >= len(wanted)), strict=True):
            self._swap(hole, row)
            others[hole], others[row] = row, hole
        self._row = {sequence: others.get(row, row) for sequence, row in self._row.items()}
        self._free = [others.get(row, row) for row in self._free]
        heapq.heapify(self._free)

    def _swap(self, *rows: int) -> None:
        """Have two rows change places."""
        views = [self._paged(self._view(row, 1)) for row in rows]
        kept = [(view.hold(view.length()), view.states()) for view in views]
        for view, (held, states) in zip(views, reversed(kept), strict=True):
            view.begin_with(held)
            view.go_on_from(states)

    def _view(self, first: int, count: int) -> Cache:
        if count == self.cache.batch:
            return self.cache
        view = self._views.get((first, count))
        if view is None:
            view = self._views[first, count] = self.cache.rows(first, first + count)
        return view
