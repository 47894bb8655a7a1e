# SPDX-License-Identifier: Apache-2.0
"""Calls of a method that are captured once and replayed again: one launch for a decode step, and no Python of the method.

A call is known by its key: shapes, dtypes and numbers of its arguments, how what its caches keep lies, and the length class
of each (the power of two up to which their longest sequence goes). Where a cache lies is read on the device, so all of one layout share
what was captured. Where a method computes for each sequence what it would for it alone, a graph is for a number of rows that a batch is padded to: rows behind it are nobody's, and stay empty. Where it computes of a prompt the logits of its last token,
a graph is for a number of tokens, whatever was there before: what those that are nobody's leave behind a sequence is not of its length.
The first call with a key runs as usual, which compiles what has to be; the second is captured; from then on a call

    reserves places in its caches on the host, which raises what there is to raise before anything runs,
    copies its tensors to where the graph reads them, and of lengths and tables of pages what is not there yet: a graph adds to its lengths,
    replays the graph, and returns copies of what that wrote.

A graph holds no memory of tokens. New weights make all graphs void.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from math import prod
from threading import Lock
from typing import Any

import torch

from nnfront.backends.backend import After
from nnfront.backends.cuda.attention import length_bucket
from nnfront.backends.cuda.captured_cache import CapturedLayer, DeviceLengths, still
from nnfront.backends.cuda.captured_call import Call, CapturedGraph, Padding
from nnfront.backends.cuda.graph_capture import GraphCapture
from nnfront.backends.cuda.graph_safety import ROWS, states_in_place
from nnfront.backends.cuda.independent_rows import BATCHES, TOKENS, Rows, independent_rows, independent_tokens
from nnfront.backends.cuda.last_token import padded
from nnfront.backends.cuda.recurrent import in_place
from nnfront.lower import MethodProgram
from nnfront.runtime.execute import Frame
from nnfront.state.cache import Cache
from nnfront.state.lengths import SequenceLengths

# Graphs of a method, and keys that were seen once: those that were used longest ago are dropped.
MAX_GRAPHS = 64
SEEN = 256
# Calls that run as usual after a capture that failed: it may have been for want of memory.
REST = 100


class Graphs:
    """The graphs of a method."""

    def __init__(
        self,
        program: MethodProgram,
        capturer: GraphCapture,
        run: Callable[[Frame], None],
        after: After | None = None,
    ) -> None:
        """`run` does all the work of a call whose arguments and dims are in a frame, `after` what is done to its result."""
        self._program = program
        self._capturer = capturer
        self._run = run
        self._after = after
        self._slots = [slot for a in program.arguments for slot in a.structure.leaves()]
        # What of a frame the caller gets; with something behind the method only what that makes.
        self._results = [*dict.fromkeys(program.result.leaves())] if after is None else []
        self._lock = Lock()
        self._loaded: weakref.ref[Any] | None = None
        self._graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        # A sampler behind it has buffers for its own batch.
        self._rows = independent_rows(program) if after is None else ""
        self._tokens = independent_tokens(program)
        self._in_place = states_in_place(program)
        # By key: how many tokens a call appends to each of its caches.
        self._growth: OrderedDict[Hashable, dict[int, int] | None] = OrderedDict()
        self._rest = 0
        self.replays = 0
        self.error = ""

    def followed_by(self, after: After) -> Graphs:
        """Return those of the method with something behind it, of which there are none yet."""
        return Graphs(self._program, self._capturer, self._run, after)

    def __len__(self) -> int:
        return len(self._graphs)

    def __str__(self) -> str:
        if self.error:
            return f"{self._program.name}: not captured, {self.error}"
        counts = f"graphs: {len(self)} of at most {MAX_GRAPHS}, calls replayed: {self.replays}"
        return f"{self._program.name}: {counts}"

    def __call__(self, loaded: object, frame: Frame, result: Callable[[Frame], Any]) -> Any:
        """Do a call whose arguments and dims are in `frame`, and return what `result` makes of a frame. Graphs are of one `loaded`.

        Raises what the call as usual raises; the caches are then to be restored.
        """
        call = None if self._rests() or self._capturer.is_capturing() else self._call_of(frame)
        if call is None:
            return self._as_usual(frame, result)
        with self._lock:
            if self._loaded is None or self._loaded() is not loaded:
                self._loaded = weakref.ref(loaded)
                self._graphs.clear()
            growth = self._growth.get(call.key, "new")
            if isinstance(growth, dict):
                _bound(self._growth, call.key, SEEN)
                replayed = self._replayed(call, frame, growth, result)
                if replayed is not None:
                    frame, made = replayed
                    return result(frame) if self._after is None else made
        found = self._as_usual(frame, result)
        with self._lock:
            self._growth[call.key] = _growth(call)
            _bound(self._growth, call.key, SEEN)
        return found

    def _rests(self) -> bool:
        self._rest = max(self._rest - 1, 0)
        return bool(self._rest)

    def _as_usual(self, frame: Frame, result: Callable[[Frame], Any]) -> Any:
        self._run(frame)
        with torch.no_grad():
            found = result(frame)
            return found if self._after is None else self._after(found)

    def _call_of(self, frame: Frame) -> Call | None:
        """Take the arguments from a frame; None for a call that is not to be captured."""
        tensors: dict[int, torch.Tensor] = {}
        caches: dict[int, Cache] = {}
        lengths: dict[int, SequenceLengths] = {}
        padding = self._padding_of(frame)
        key: list[Hashable] = [None if padding is None else padding.rows]
        for slot in self._slots:
            value = frame[slot]
            if isinstance(value, torch.Tensor):
                if not 0 < _rows(value) <= ROWS:
                    return None
                tensors[slot] = value
                key += [value.shape if padding is None else padding.padded(slot, value.shape), value.dtype]
            elif isinstance(value, Cache):
                found = value[0].lengths if len(value) else None
                if found is None or any(layer.lengths is not found for layer in value):
                    return None
                caches[slot], lengths[slot] = value, found
                key += [value.arrangement, *self._alike(value, padding)]
            elif isinstance(value, (int, float, bool)):
                key += [type(value).__name__, value]
            else:
                return None
        return Call(tuple(key), tensors, caches, lengths, padding)

    def _alike(self, cache: Cache, padding: Padding | None) -> tuple[int, ...]:
        """What caches have in common that a graph serves: the length class, which says how many blocks share the tokens of a sequence; for tokens that
        are padded nothing, as blocks are for these.
        """
        if padding is not None and padding.where.axis:
            return ()
        bucket = length_bucket(cache[0].lengths.longest + 1)
        return (bucket, cache.batch) if padding is None else (bucket,)

    def _padding_of(self, frame: Frame) -> Padding | None:
        """How a call is padded; None for one that is captured for its own numbers."""
        caches = [value for slot in self._slots if isinstance(value := frame[slot], Cache)]
        for where, sizes in ((self._rows, BATCHES), (self._tokens, TOKENS)):
            if isinstance(where, Rows) and (count := frame[where.dim]):
                rows = next((rows for rows in sizes if rows >= count), None)
                if rows is not None and all(_takes(cache, where.axis, rows) for cache in caches):
                    return Padding(count, rows, where)
        return None

    def _replayed(
        self, call: Call, frame: Frame, growth: dict[int, int], result: Callable[[Frame], Any]
    ) -> tuple[Frame, torch.Tensor | None] | None:
        """Replay the graph of a call, made now if there is none; None, with nothing done, if it cannot be made."""
        marks = [cache.mark() for cache in call.caches.values()]
        for slot, cache in call.caches.items():
            if growth[slot]:
                for layer in cache:
                    layer.advance(growth[slot] * call.tokens)
        # A caller's inference mode must not decide what the memory of a graph is.
        with self._capturer.turn(), torch.inference_mode(False), torch.no_grad():
            for cache in call.caches.values():
                for layer in cache:
                    layer.settled()
            graph = self._graphs.get(call.key)
            if graph is None:
                graph = self._captured(call, frame, growth, result)
                if graph is None:
                    for cache, mark in zip(call.caches.values(), marks, strict=True):
                        cache.restore(mark)
                    return None
                self._graphs[call.key] = graph
            graph.fill(call)
            _bound(self._graphs, call.key, MAX_GRAPHS)
            # Memory is had before anything is written that could not be taken back.
            replayed, copies = graph.frame.copy(), []
            for slot in self._results:
                if isinstance(written := replayed[slot], torch.Tensor):
                    theirs = written if call.padding is None else call.padding.theirs(slot, written)
                    copies.append((theirs, torch.empty_like(theirs)))
                    replayed[slot] = copies[-1][1]
            made = None if graph.made is None else torch.empty_like(graph.made)
            if graph.made is not None and made is not None:
                copies.append((graph.made, made))
            graph.replay()
            graph.grown(call, growth)
            self.replays += 1
            for written, copy in copies:
                copy.copy_(written)
        return replayed, made

    def _captured(
        self, call: Call, frame: Frame, growth: dict[int, int], result: Callable[[Frame], Any]
    ) -> CapturedGraph | None:
        """Capture a call. Says once, as a warning, why it cannot be."""
        given, padding = frame.copy(), call.padding
        if padding is not None:
            given[padding.where.dim] = padding.rows
        graph = CapturedGraph(
            {
                # What a row that is nobody's holds is any token.
                slot: t.new_zeros(t.shape if padding is None else padding.padded(slot, t.shape))
                for slot, t in call.tensors.items()
            },
            {
                slot: torch.zeros(2, call.rows(cache), dtype=torch.int32, device=cache[0].lengths.device)
                for slot, cache in call.caches.items()
            },
            {
                slot: [t.new_empty(call.rows(cache), t.shape[1]) for t in tables]
                for slot, cache in call.caches.items()
                if (tables := cache.page_tables().values())
            },
            {
                slot: torch.zeros(
                    len(cache),
                    max(map(len, cache.addresses)),
                    dtype=torch.int64,
                    device=cache[0].lengths.device,
                )
                for slot, cache in call.caches.items()
            },
            {slot: cache.addresses for slot, cache in call.caches.items()},
            frame.copy(),
        )
        graph.fill(call)
        for slot, static in graph.tensors.items():
            given[slot] = static
        # The function may run more than once before the first replay.
        changed = [rows for cache in call.caches.values() for layer in cache for rows in layer.settled()]
        changed += [] if self._after is None else self._after.state()
        before = [tensor.clone() for tensor in changed]

        def run() -> None:
            layers: list[CapturedLayer] = []
            inside, width, theirs = given.copy(), 1, None
            if padding is not None and padding.where.axis:
                width, theirs = padding.rows, next(iter(graph.counts.values()))[1]
            for slot, cache in call.caches.items():
                bound = length_bucket(call.lengths[slot].longest + 1) if width == 1 else cache.max_seq
                tables = dict(zip(cache.page_tables(), graph.tables.get(slot, ()), strict=True))
                counts, tokens = graph.counts[slot]
                lengths = DeviceLengths((bound - width,) * len(counts), counts, tokens, width)
                stay = [(layer, name) for at, layer, name in self._in_place if at == slot]
                inside[slot] = still(cache, lengths, tables, graph.bases[slot], stay)
                layers += inside[slot]
            states = [state for layer in layers for state in layer.states]
            bases = {state.rows.data_ptr(): state.base for state in states if state.is_in_place}
            with padded(theirs), in_place(bases):
                self._run(inside)
            if self._after is not None:
                graph.made = self._after(result(inside))
            for slot in self._results:
                graph.frame[slot] = inside[slot]
            for state in states:  # when nothing reads what was there before
                state.keep()
            for slot, count in growth.items():
                counts, tokens = graph.counts[slot]
                counts.add_(tokens, alpha=count)

        try:
            graph.replay = self._capturer.capture(run)
        except Exception as error:
            self._give_up(error)
            return None
        finally:
            with torch.inference_mode():
                for tensor, content in zip(changed, before, strict=True):
                    tensor.copy_(content)
        kept = [None] * len(frame)
        for slot in self._results:
            kept[slot] = graph.frame[slot]
        graph.frame = kept
        graph.counted.clear()
        self._rest, self.error = 0, ""
        return graph

    def _give_up(self, error: Exception) -> None:
        """Let calls run as usual for a while."""
        found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if found != self.error:
            warnings.warn(
                f"{self._program.name} is not captured, its next {REST} calls run as usual: {found}",
                RuntimeWarning,
                stacklevel=2,
            )
        self.error, self._rest = found, REST + 1


def _rows(value: torch.Tensor) -> int:
    """How many tokens, or rows of features, a tensor has."""
    return prod(value.shape[:-1] if value.is_floating_point() else value.shape)


def _takes(cache: Cache, axis: int, rows: int) -> bool:
    """Whether rows that are nobody's write over nothing. Sequences: they have no page, or the kernel that attends with keys and values stores no token for
    them, as those of recurrences and `copy_rows` write no state. Tokens: they are behind those of the only sequence, at positions that there are.
    """
    if axis:
        return cache.batch == 1 and cache[0].lengths.longest + rows <= cache.max_seq
    return all(layer.table_key is not None or len(layer.type.per_token) in (0, 2) for layer in cache)


def _growth(call: Call) -> dict[int, int] | None:
    """How many tokens a call has appended to each of its caches; None if that is not one number for all sequences and layers."""
    found: dict[int, int] = {}
    for slot, cache in call.caches.items():
        before = call.lengths[slot].values
        grown = {after - n for layer in cache for n, after in zip(before, layer.lengths.values, strict=True)}
        if len(grown) > 1:
            return None
        found[slot], left = divmod(grown.pop() if grown else 0, call.tokens)
        if left:
            return None
    return found


def _bound(kept: OrderedDict[Hashable, Any], used: Hashable, count: int) -> None:
    """Keep what was used last."""
    kept.move_to_end(used)
    while len(kept) > count:
        kept.popitem(last=False)
