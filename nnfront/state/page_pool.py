# SPDX-License-Identifier: Apache-2.0
"""A pool of pages: who holds which, and what lies in them.

Layers that have the same window go through the same tokens, so one page is a place in the buffers of all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from nnfront.backends.device import sent
from nnfront.state.quantize import Parts


class Pool:
    """Pages of `page_size` tokens. `counts` says for each how many sequences hold it.

    `layers` has what each layer keeps of tokens: [*lead, pages, page_size, last].
    """

    __slots__ = ("_free", "_written", "counts", "layers", "page_size", "tables")

    def __init__(self, page_size: int, layers: Sequence[Parts], pages: int) -> None:
        self.page_size = page_size
        self.layers = tuple(layers)
        self.counts = [0] * pages
        self._free = list(range(pages - 1, -1, -1))  # the last one goes first
        self._written: set[int] = set()
        # The tables whose sequences hold pages: each has `evict()`.
        self.tables: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Those of all layers."""
        return [part for layer in self.layers for part in layer.all]

    @property
    def pages(self) -> int:
        """How many there are."""
        return len(self.counts)

    @property
    def free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    def settle(self) -> None:
        """Take back the pages that no sequence can see any more."""
        for table in list(self.tables):
            table.evict()

    def take(self, count: int) -> list[int]:
        """Hand out pages, at most as many as are free, each held once."""
        split = len(self._free) - count
        taken, self._free = self._free[split:][::-1], self._free[:split]
        for page in taken:
            self.counts[page] = 1
        # Attention multiplies slots that it does not see by 0, and 0 times what another sequence left there may be NaN.
        used = [page for page in taken if page in self._written]
        if used:
            self._fill(used)
        self._written.update(taken)
        return taken

    def _fill(self, pages: list[int]) -> None:
        index = self._sent(pages)
        for buffer in self.buffers:
            buffer.index_fill_(-3, index, 0)

    def _sent(self, pages: list[int]) -> torch.Tensor:
        """Numbers of pages where the buffers are: all are on one device, to which they go once."""
        return sent(pages, torch.int64, self.buffers[0].device)

    def share(self, pages: Iterable[int]) -> None:
        """Count one more sequence that holds each."""
        for page in pages:
            self.counts[page] += 1

    def clone(self) -> Pool:
        """A copy of the buffers, in which nobody holds a page yet."""
        pool = Pool(self.page_size, [layer.map(torch.clone) for layer in self.layers], self.pages)
        pool._written = set(self._written)
        return pool

    def claim(self, pages: Iterable[int]) -> None:
        """Count one more sequence that holds each, of pages that may be free."""
        self.share(pages)
        self._free = [page for page in reversed(range(self.pages)) if not self.counts[page]]

    def drop(self, pages: Iterable[int]) -> None:
        """Count one sequence less that holds each; what nobody holds is free."""
        for page in pages:
            self.counts[page] -= 1
            if not self.counts[page]:
                self._free.append(page)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy what lies in some pages to others, in every layer."""
        source, target = self._sent(sources), self._sent(targets)
        for buffer in self.buffers:
            pages = buffer.movedim(-3, 0)
            pages[target] = pages[source]
