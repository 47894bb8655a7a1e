# SPDX-License-Identifier: Apache-2.0
"""What a layer keeps of each sequence, whatever its length: the state of a recurrence, the last inputs of a convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from nnfront.errors import RunError
from nnfront.lower import StateLayerType
from nnfront.state.lengths import SequenceLengths
from nnfront.state.use import LayerState, Use


class Saved(NamedTuple):
    """A copy of what is kept: its bytes, how to put it back, and whether it still can be."""

    nbytes: int
    put_back: Callable[[], None]
    is_there: Callable[[], bool] = lambda: True


class FixedState(LayerState):
    """The buffer [sequences, *shape] that all views share. A tensor that was written as a whole is replaced, never written again; `seen` says
    that somebody else may look at it, so that even single rows of it are not. `home` is where captured calls write it: nobody else ever sees that.
    """

    __slots__ = ("buffer", "home", "seen")

    def __init__(self, buffer: torch.Tensor, lengths: SequenceLengths, use: Use) -> None:
        super().__init__(lengths, use)
        self.home: torch.Tensor | None = None
        self.put(buffer, seen=False)

    def put(self, buffer: torch.Tensor, seen: bool) -> None:
        """Have another tensor as the buffer."""
        self.buffer, self.seen = buffer, seen


class FixedStorage:
    """One buffer, for `batch` sequences in a row of those that its state knows."""

    __slots__ = ("_first", "_state", "batch")

    def __init__(self, state: FixedState, first: int, batch: int) -> None:
        self._state = state
        self._first = first
        self.batch = batch

    @property
    def state(self) -> FixedState:
        """What it shares with other views."""
        return self._state

    @property
    def lengths(self) -> SequenceLengths:
        """How many tokens each sequence has."""
        return self._state.lengths.part(self._first, self.batch)

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._rows().nbytes

    @property
    def tensor(self) -> torch.Tensor:
        """Where the rows lie now: [batch, *shape]. The next write may put them elsewhere."""
        return self._rows()

    def read(self) -> torch.Tensor:
        """The rows [batch, *shape], which keep their elements when the storage is written."""
        if not self._is_whole or self._state.buffer is self._state.home:
            return self._rows().clone()
        self._state.seen = True
        return self._state.buffer

    def write(self, value: torch.Tensor, seq: int, max_seq: int, *, take_over: bool = False) -> None:
        """The rows after `seq` more tokens; with `take_over` nobody else sees or writes `value`, which becomes the buffer.

        Raises RunError, before anything is written, if there would be more than `max_seq` tokens.
        """
        self.grow(seq, max_seq)
        self._put(value, take_over)

    def grow(self, seq: int, max_seq: int) -> None:
        """Count `seq` more tokens of each sequence. Raises RunError if there would be more than `max_seq`."""
        before = self.lengths
        if before.longest + seq > max_seq:
            raise full(before, seq, max_seq)
        self._state.lengths = self._state.lengths.grow(self._first, self.batch, seq)

    def settled(self) -> torch.Tensor:
        """The rows [batch, *shape] where a captured call reads and writes them: in memory that stays where it is, and that nobody else sees."""
        state = self._state
        if state.home is None:
            state.home = state.buffer.clone() if state.seen else state.buffer
        elif state.buffer is not state.home:
            with torch.inference_mode():  # as below
                state.home.copy_(state.buffer)
        state.put(state.home, seen=False)
        return self._rows()

    def clear(self) -> None:
        """Forget what is kept of sequences without tokens."""
        empty = [i for i, n in enumerate(self.lengths.values) if not n]
        if empty:
            zeros = self.tensor.clone()
            zeros[empty] = 0
            self._put(zeros, take_over=True)

    def _put(self, value: torch.Tensor, take_over: bool) -> None:
        state, journal = self._state, self._state.use.journal
        if not self._is_whole:
            if journal is not None:
                old = self._rows().clone()
                journal.entries.append(lambda: self._write_over(old))
            self._write_over(value)
            return
        if journal is not None:
            buffer, seen = state.buffer, state.seen
            journal.entries.append(lambda: state.put(buffer, seen))
        is_own = take_over and value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        state.put(value if is_own else value.clone(memory_format=torch.contiguous_format), seen=False)

    def _write_over(self, value: torch.Tensor) -> None:
        state = self._state
        if state.seen:
            state.put(state.buffer.clone(), seen=False)
        with torch.inference_mode():  # what a call has made may not be written outside
            self._rows().copy_(value)

    def save(self) -> Saved:
        """What is kept now. It is copied when it is written next."""
        rows = self.read()
        return Saved(rows.nbytes, lambda: self.put_back(rows))

    def put_back(self, rows: torch.Tensor) -> None:
        """Keep what was read of these sequences, or of others: [batch, *shape]. Others may look at it."""
        if self._is_whole:
            self._state.put(rows, seen=True)
        else:
            self._write_over(rows)

    def part(self, first: int, count: int) -> FixedStorage:
        """The buffer of some of the sequences."""
        return FixedStorage(self._state, self._first + first, count)

    def copied(self, sequences: torch.Tensor, lengths: SequenceLengths, use: Use) -> FixedStorage:
        """A buffer of its own for some of the sequences."""
        rows = self._rows().index_select(0, sequences)
        return FixedStorage(FixedState(rows, lengths, use), 0, len(sequences))

    def set_lengths(self, lengths: SequenceLengths) -> None:
        """Say how many tokens each sequence has from now on."""
        self._state.cut(self._first, lengths)

    @property
    def _is_whole(self) -> bool:
        return self.batch == self._state.buffer.shape[0]  # `len` of a tensor takes ten times as long

    def _rows(self) -> torch.Tensor:
        return self._state.buffer if self._is_whole else self._state.buffer.narrow(0, self._first, self.batch)


def make_fixed(type: StateLayerType, lengths: SequenceLengths, use: Use) -> dict[str, FixedStorage]:
    """What an empty layer keeps of each sequence."""
    assert isinstance(type.batch, int)
    made = {}
    for buffer in type.per_sequence:
        shape = (type.batch, *buffer.shape)
        zeros = torch.zeros(shape, dtype=getattr(torch, buffer.dtype), device=lengths.device)
        made[buffer.name] = FixedStorage(FixedState(zeros, lengths, use), 0, type.batch)
    return made


def full(before: SequenceLengths, seq: int, max_seq: int) -> RunError:
    """What a storage says that `seq` more tokens do not fit in."""
    return RunError(
        f"cache is full: 'max_seq' = {max_seq} holds {before.longest} tokens, {seq} more do not fit",
        help="make a cache with a larger max_seq, or call cache.reset()",
    )
