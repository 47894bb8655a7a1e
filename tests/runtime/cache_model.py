# SPDX-License-Identifier: Apache-2.0
"""What a cache means, written down with lists: every token of every sequence, and attention by its formula, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nnfront.ir import StateType, kv_layer
from nnfront.state.cache import Cache
from nnfront.state.contiguous import make_cache


def new_cache(
    batch: int,
    max_seq: int,
    windows: tuple[int | None, ...] = (None,),
    heads: int = 2,
    size: int = 4,
    dtype: str = "float32",
    page_size: int | None = None,
    pages: int | None = None,
    stored_as: str | None = None,
) -> Cache:
    layers = tuple(kv_layer(heads, size, dtype, batch, max_seq, window) for window in windows)
    return make_cache(StateType(layers), {}, page_size=page_size, pages=pages, stored_as=stored_as)


def exact_in_codes(*shape: int) -> torch.Tensor:
    """Random rows that a cache of float8_e4m3fn codes holds exactly: the largest of each is 448 times a power of two."""
    codes = torch.randint(0, 0x7F, shape, dtype=torch.uint8)  # 0x7f is the NaN
    rows = codes.view(torch.float8_e4m3fn).float() * torch.randint(0, 2, shape).mul_(2).sub_(1)
    rows[..., 0] = 448.0
    return rows * torch.exp2(torch.randint(-12, -7, (*shape[:-1], 1)).float())


@dataclass
class ListLayer:
    """One layer: for each sequence the keys and values [heads, size] of its tokens, in order, none ever forgotten."""

    window: int | None
    keys: list[list[torch.Tensor]]
    values: list[list[torch.Tensor]]

    def append(self, row: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v [seq, heads, size]."""
        self.keys[row] += list(k)
        self.values[row] += list(v)

    def attend(
        self, row: int, q: torch.Tensor, window: int | None = None, scale: float | None = None
    ) -> torch.Tensor:
        """q [seq, heads, size] of the last tokens of a sequence, [seq, heads, size]."""
        keys, values = (torch.stack(x[row]).double() for x in (self.keys, self.values))
        start = len(keys) - len(q)
        results = []
        for i, query in enumerate(q.double(), start):
            limits = [w for w in (self.window, window) if w is not None]
            first = max([0, *(i - w + 1 for w in limits)])
            results.append(_attend_one(query, keys[first : i + 1], values[first : i + 1], scale))
        return torch.stack(results)


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """query [heads, size], keys and values [tokens, groups, size]."""
    shared = query.shape[0] // keys.shape[1]
    factor = query.shape[1] ** -0.5 if scale is None else scale
    rows = []
    for head, q in enumerate(query):
        k, v = keys[:, head // shared], values[:, head // shared]
        weights = torch.softmax(k @ q * factor, 0)
        rows.append(weights @ v)
    return torch.stack(rows)


@dataclass
class ListCache:
    """The model of a cache."""

    batch: int
    windows: tuple[int | None, ...]
    layers: list[ListLayer] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        rows = range(self.batch)
        self.layers = [ListLayer(w, [[] for _ in rows], [[] for _ in rows]) for w in self.windows]

    def fork(self, sequences: Sequence[int]) -> "ListCache":
        forked = ListCache(len(sequences), self.windows)
        for mine, new in zip(self.layers, forked.layers, strict=True):
            new.keys = [list(mine.keys[i]) for i in sequences]
            new.values = [list(mine.values[i]) for i in sequences]
        return forked

    def truncate(self, length: int) -> None:
        for layer in self.layers:
            for tokens in (*layer.keys, *layer.values):
                del tokens[length:]

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.layers[0].keys]
