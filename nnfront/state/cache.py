# SPDX-License-Identifier: Apache-2.0
"""What the caches of a method have in common: layers, one length for each sequence, and ways back.

There are two: `ContiguousCache`, whose sequences have a buffer each (`nnfront.state.contiguous`), and `PagedCache`, whose sequences share a pool
of pages (`nnfront.state.paged`). A cache belongs to one caller. Tokens are written in place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, Self

import torch

from nnfront.errors import RunError
from nnfront.lower import CacheLayerType, CacheType
from nnfront.state.layer import CacheLayer
from nnfront.state.lengths import SequenceLengths
from nnfront.state.type import layout


@lru_cache(maxsize=1024)
def _interned_places(places: tuple[object, ...]) -> object:
    return object()


class Use:
    """The call that uses a cache now, one at a time; caches that share memory have one of these together."""

    __slots__ = ("_lock", "method")

    def __init__(self) -> None:
        self._lock = Lock()
        self.method = ""

    def begin(self, method: str) -> bool:
        """Take it for a call of a method; False if another call has it."""
        if not self._lock.acquire(blocking=False):
            return False
        self.method = method
        return True

    def end(self) -> None:
        """Give it back."""
        self._lock.release()


class Cache(Sequence[CacheLayer]):
    """All layers of a cache. Make one with `session.make_cache(...)`.

    `batch` sequences of up to `max_seq` tokens. Iterates over its layers.
    """

    __slots__ = ("_layers", "_places", "batch", "layout", "max_seq", "type", "use")

    def __init__(self, type: CacheType, layers: Sequence[CacheLayer], use: Use | None = None) -> None:
        """`use` is that of a cache whose memory this one shares."""
        self.type = type
        self.use = use or Use()
        self.layout = layout(type)
        self.batch: int = layers[0].batch if layers else 0
        self.max_seq: int = layers[0].max_seq if layers else 0
        self._layers = tuple(layers)
        self._places: object = None

    @property
    def places(self) -> object:
        """The same object for another cache only if its layers lie in the same memory in the same way."""
        if self._places is None:
            tensors = (tensor for layer in self for tensor in layer.storage.tensors())
            found = [(t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for t in tensors]
            self._places = _interned_places((self.layout, self.batch, self.max_seq, *found))
        return self._places

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
    def lengths_tensor(self) -> torch.Tensor:
        """How many tokens each sequence has: int32 [batch], on the device of the cache."""

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
        types: dict[int, CacheLayerType] = {}
        shared = tuple(
            types.setdefault(id(old), new.type) for old, new in zip(self.type.layers, layers, strict=True)
        )
        return type(self)(CacheType(shared), layers, use)

    def _lengths_of(self, sequences: Sequence[int]) -> list[SequenceLengths]:
        """The lengths of some sequences in each layer: one object where the layers have one.

        Not remembered by the old ones: these may stay for long, and what forks derive from theirs would stay with them.
        """
        old = {id(layer.lengths): layer.lengths for layer in self._layers}
        new = {key: x.like(tuple(x.values[i] for i in sequences)) for key, x in old.items()}
        return [new[id(layer.lengths)] for layer in self._layers]

    def reset(self) -> None:
        """Forget all tokens."""
        self._set(self._lengths.like((0,) * self.batch))

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` tokens of each sequence.

        Raises RunError if a window has dropped tokens that the sequence would see again.
        """
        lengths = self._lengths
        self._cut(lengths.like(tuple(min(n, length) for n in lengths.values)))

    def uneven(self) -> int | None:
        """Return the first layer that does not hold as many tokens of each sequence as layer 0; None if all do."""
        lengths = self._lengths
        for i, layer in enumerate(self._layers):
            if layer.lengths is not lengths and layer.lengths.values != lengths.values:
                return i
        return None

    def mark(self) -> SequenceLengths:
        """What `restore` goes back to."""
        return self._lengths

    def restore(self, mark: SequenceLengths) -> None:
        """Forget what was appended after `mark`, in every layer; for a call that failed half way.

        If a window's tokens have been dropped meanwhile, nothing can be kept: the cache is reset.
        """
        try:
            self._cut(mark)
        except RunError:
            self.reset()

    def _cut(self, lengths: SequenceLengths) -> None:
        for layer in self._layers:
            for row, (now, wanted) in enumerate(zip(layer.lengths.values, lengths.values, strict=True)):
                if wanted < now and not layer.keeps(row, wanted):
                    raise RunError(
                        f"the cache cannot be cut to {wanted} tokens: it has {now}, and a window keeps only the last {layer.window}",
                        help="call cache.reset() and give the tokens again",
                    )
        self._set(lengths)

    def _set(self, lengths: SequenceLengths) -> None:
        for layer in self._layers:
            layer.set_lengths(lengths)

    def __repr__(self) -> str:
        return (
            f"<Cache {len(self)} layers, batch {self.batch}, max_seq {self.max_seq}, lengths {self.lengths}>"
        )
