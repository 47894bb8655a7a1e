# SPDX-License-Identifier: Apache-2.0
"""What fits on a device besides what is there: a cache, and with it the calls that take one, by their memory plans. Nothing runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from nnfront.backends.registry import backend_of
from nnfront.backends.table import memory_policy
from nnfront.dims import Symbol, evaluate
from nnfront.errors import RunError
from nnfront.ir import type_symbols
from nnfront.ir.summary import bytes_text
from nnfront.lower import MethodProgram, Program, StateType
from nnfront.memory.concrete_sizes import symbols_of
from nnfront.memory.free_memory import FreeMemory, most
from nnfront.memory.layout import Layer
from nnfront.memory.liveness import layer_of
from nnfront.memory.plan import plan_memory
from nnfront.state.quantize import token_bytes

# A thirty-second of a device is left alone: what libraries take for themselves, and memory in pieces too small to use. An estimate.
SPARE = 32
# The greatest number that is tried for a dim that has no greatest value.
UNBOUNDED = 1 << 24


class Fit:
    """A cache of a program's methods on a device. `sizes` are the dims of the cache, and those that weights have bound.

    `calls` are numbers for other dims of the methods that take the cache; those that are not given count as the largest they can be, but
    never as more than the cache's `max_seq`. `page_size` is 0 for a contiguous cache, `coded` says that it
    stores codes of 8 bits.
    """

    def __init__(
        self,
        program: Program,
        type: StateType,
        room: FreeMemory,
        *,
        page_size: int = 0,
        calls: Mapping[str, int] | None = None,
        coded: bool = False,
    ) -> None:
        """Raises RunError for a name in `calls` that no method with a cache has."""
        self.type = type
        self.room = room
        self._page_size = page_size
        self._calls = dict(calls or {})
        self._coded = coded
        self._backend = backend_of(program.target)
        self._policy = memory_policy(program.target)
        states = [a.type for m in program.methods.values() for a in m.arguments if a.role == "state"]
        assert type in states
        self._methods = [m for m in program.methods.values() if any(a.role == "state" for a in m.arguments)]
        names = dict.fromkeys(s.name for m in self._methods for s in symbols_of(m))
        for name in self._calls:
            if name not in names:
                raise RunError(
                    f"make_cache: {name!r} in calls is not a dim of a method that takes the cache",
                    help=f"dims are {', '.join(names)}",
                )

    @cached_property
    def dims(self) -> dict[str, Symbol]:
        """The dims of the cache by name."""
        return {symbol.name: symbol for symbol in type_symbols(self.type)}

    @property
    def budget(self) -> int:
        """Bytes for the cache and its calls."""
        return max(self.room.free - self.room.total // SPARE, 0)

    def cache_bytes(self, sizes: Mapping[str, int], pages: int | None = None) -> int:
        """The bytes of a cache."""
        layers = [
            layer_of(t, lambda size: evaluate(size, sizes), self._policy.ring_windows)
            for t in self.type.layers
        ]
        sequences = sum(layer.batch * layer.sequence_bytes for layer in layers)
        if not self._page_size:
            return sequences + sum(
                layer.batch * layer.capacity * token_bytes(layer, self._coded) for layer in layers
            )
        if pages is None:
            pages = self.all_pages(sizes)
        return sequences + pages * self._page_size * self.token_bytes

    @cached_property
    def token_bytes(self) -> int:
        """The bytes of a token in all layers."""
        return sum(token_bytes(Layer(layer, 1, 1), self._coded) for layer in self.type.layers)

    def all_pages(self, sizes: Mapping[str, int]) -> int:
        """The pages of a pool that all sequences need at their longest."""
        return max(
            (
                evaluate(layer.batch, sizes) * -(-evaluate(layer.max_seq, sizes) // self._page_size)
                for layer in self.type.layers
            ),
            default=0,
        )

    def call_bytes(self, sizes: Mapping[str, int]) -> int:
        """The most that a call takes with a cache of these sizes: results, what is in between, and on a GPU what graphs keep of that."""
        longest = max((evaluate(layer.max_seq, sizes) for layer in self.type.layers), default=0)
        known = {**sizes, **self._calls}
        calls = max(
            self._peak(m, {s.name: known.get(s.name, _floor(s, longest)) for s in symbols_of(m)})
            for m in self._methods
        )
        captured = self._methods if self._backend.captures else []
        return calls + sum(
            # The graphs of a method share their memory. They are of calls of few rows.
            self._peak(m, {s.name: sizes.get(s.name, max(s.min, 1)) for s in symbols_of(m)})
            for m in captured
            if not self._backend.why_not_captured(m)
        )

    def _peak(self, method: MethodProgram, sizes: Mapping[str, int]) -> int:
        return plan_memory(method, sizes, self._policy).peak

    def most(self, name: str, sizes: Mapping[str, int]) -> int:
        """The greatest number for a dim of the cache that fits, 0 if none does; `sizes` has the others."""
        symbol = self.dims[name]
        high, step = symbol.max or UNBOUNDED, symbol.multiple_of

        def fits(count: int) -> bool:
            tried = {**sizes, name: count * step}
            cache = self.cache_bytes(tried)  # before the calls, which take longer to plan
            return cache <= self.budget and cache + self.call_bytes(tried) <= self.budget

        found = step * most(high // step, fits)
        return found if found >= symbol.min else 0

    def most_pages(self, sizes: Mapping[str, int]) -> int:
        """How many pages fit in a pool, at most as many as all sequences need."""
        left = self.budget - self.call_bytes(sizes) - self.cache_bytes(sizes, 0)
        return max(min(left // max(self._page_size * self.token_bytes, 1), self.all_pages(sizes)), 0)

    def offers(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """What fits instead of these sizes, in words, each with another of them less."""
        if self._page_size:
            pages = self.most_pages(sizes)
            yield f"{pages:,} pages of {self._page_size}, which is {pages * self._page_size:,} tokens"
            return
        for name in self.dims:
            found = self.most(name, sizes)
            if 0 < found < sizes[name]:
                others = ", ".join(f"{n}={sizes[n]}" for n in self.dims if n != name)
                yield f"{name} up to {found:,}" + (f" with {others}" if others else "")

    def lines(self, sizes: Mapping[str, int]) -> list[str]:
        """What there is, what calls take besides the cache, and what fits."""
        offers = list(self.offers(sizes)) or ["nothing: calls alone take more than there is"]
        return [
            str(self.room),
            f"calls with it take up to {bytes_text(self.call_bytes(sizes))} besides",
            f"fits: {'; '.join(offers)}",
        ]


def _floor(symbol: Symbol, longest: int) -> int:
    """The largest that a dim can be, but no more than `longest`."""
    high = min(longest, symbol.max if symbol.max is not None else longest)
    return max(high - high % symbol.multiple_of, symbol.min)
