# SPDX-License-Identifier: Apache-2.0
"""Calls of a method that are captured once and replayed again: one launch for a decode step, and no Python of the method.

A call is known by its key: shapes, dtypes and numbers of its arguments, where its caches lie, and the length class of each (the power of two
up to which their longest sequence goes). The first call with a key runs as usual, which compiles what has to be; the second is
captured; from then on a call

    reserves places in its caches on the host, which raises what there is to raise before anything runs,
    copies its tensors, and how many tokens the caches hold, to where the graph reads them,
    replays the graph, and returns copies of what that wrote.

A graph holds no memory of a cache. New weights make all graphs void.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Any

import torch

from nnfront.backends.cuda.attention import length_bucket
from nnfront.backends.cuda.graph_capture import GraphCapture
from nnfront.backends.cuda.graph_safety import ROWS
from nnfront.lower import MethodProgram
from nnfront.runtime.execute import Frame
from nnfront.state.cache import Cache
from nnfront.state.captured import still
from nnfront.state.lengths import SequenceLengths

# Graphs of a method, and keys that were seen once: those that were used longest ago are dropped.
MAX_GRAPHS = 64
SEEN = 256


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a call, by slot."""

    key: Hashable
    tensors: dict[int, torch.Tensor]
    caches: dict[int, Cache]
    lengths: dict[int, SequenceLengths]


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    """Where it reads its tensors and how many tokens caches hold, what it writes, and the frame of all else that a result is made of."""

    tensors: dict[int, torch.Tensor]
    counts: dict[int, torch.Tensor]
    frame: Frame
    replay: Callable[[], None]


class Graphs:
    """The graphs of a method."""

    def __init__(self, program: MethodProgram, capturer: GraphCapture, run: Callable[[Frame], None]) -> None:
        """`run` does all the work of a call whose arguments and dims are in a frame."""
        self._program = program
        self._capturer = capturer
        self._run = run
        self._slots = [slot for a in program.arguments for slot in a.structure.leaves()]
        self._results = [*dict.fromkeys(program.result.leaves())]
        self._lock = Lock()
        self._loaded: weakref.ref[Any] | None = None
        self._graphs: OrderedDict[Hashable, _CapturedGraph] = OrderedDict()
        # By key: how many tokens a call appends to each of its caches.
        self._growth: OrderedDict[Hashable, dict[int, int] | None] = OrderedDict()
        self.replays = 0
        self.error = ""

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
        call = None if self.error else self._call_of(frame)
        if call is None:
            return self._as_usual(frame, result)
        with self._lock:
            if self._loaded is None or self._loaded() is not loaded:
                self._loaded = weakref.ref(loaded)
                self._graphs.clear()
            growth = self._growth.get(call.key, "new")
            if isinstance(growth, dict):
                _bound(self._growth, call.key, SEEN)
                replayed = self._replayed(call, frame, growth)
                if replayed is not None:
                    return result(replayed)
        found = self._as_usual(frame, result)
        with self._lock:
            self._growth[call.key] = _growth(call)
            _bound(self._growth, call.key, SEEN)
        return found

    def _as_usual(self, frame: Frame, result: Callable[[Frame], Any]) -> Any:
        self._run(frame)
        with torch.no_grad():
            return result(frame)

    def _call_of(self, frame: Frame) -> _Call | None:
        """Take the arguments from a frame; None for a call that is not to be captured."""
        tensors: dict[int, torch.Tensor] = {}
        caches: dict[int, Cache] = {}
        lengths: dict[int, SequenceLengths] = {}
        key: list[Hashable] = []
        for slot in self._slots:
            value = frame[slot]
            if isinstance(value, torch.Tensor):
                if _rows(value) > ROWS:
                    return None
                tensors[slot] = value
                key += [value.shape, value.dtype]
            elif isinstance(value, Cache):
                found = value[0].lengths if len(value) else None
                if found is None or any(layer.lengths is not found for layer in value):
                    return None
                caches[slot], lengths[slot] = value, found
                key += [value.places, length_bucket(found.longest + 1)]
            elif isinstance(value, (int, float, bool)):
                key += [type(value).__name__, value]
            else:
                return None
        return _Call(tuple(key), tensors, caches, lengths)

    def _replayed(self, call: _Call, frame: Frame, growth: dict[int, int]) -> Frame | None:
        """Replay the graph of a call, made now if there is none; None, with nothing done, if it cannot be made."""
        marks = [cache.mark() for cache in call.caches.values()]
        for slot, cache in call.caches.items():
            if growth[slot]:
                for layer in cache:
                    layer.take(growth[slot])
        # A caller's inference mode must not decide what the memory of a graph is.
        with self._capturer.turn(), torch.inference_mode(False), torch.no_grad():
            graph = self._graphs.get(call.key)
            if graph is None:
                graph = self._captured(call, frame)
                if graph is None:
                    for cache, mark in zip(call.caches.values(), marks, strict=True):
                        cache.restore(mark)
                    return None
                self._graphs[call.key] = graph
            else:
                _fill(graph, call)
            _bound(self._graphs, call.key, MAX_GRAPHS)
            graph.replay()
            self.replays += 1
            replayed = graph.frame.copy()
            for slot in self._results:
                if isinstance(replayed[slot], torch.Tensor):
                    replayed[slot] = replayed[slot].clone()
        return replayed

    def _captured(self, call: _Call, frame: Frame) -> _CapturedGraph | None:
        """Capture a call. Says once, as a warning, why it cannot be."""
        tensors = {
            slot: torch.empty_like(t, memory_format=torch.contiguous_format)
            for slot, t in call.tensors.items()
        }
        counts = {slot: torch.empty_like(found.counts()) for slot, found in call.lengths.items()}
        given = frame.copy()
        graph = _CapturedGraph(tensors, counts, frame.copy(), lambda: None)
        _fill(graph, call)
        for slot, static in tensors.items():
            given[slot] = static

        def run() -> None:
            inside = given.copy()
            for slot, cache in call.caches.items():
                longest = length_bucket(call.lengths[slot].longest + 1)
                inside[slot] = still(cache, counts[slot], longest - 1)
            self._run(inside)
            for slot in self._results:
                graph.frame[slot] = inside[slot]

        try:
            replay = self._capturer.capture(run)
        except Exception as error:
            self.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            warnings.warn(
                f"{self._program.name} is not captured, all its calls run as usual: {self.error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        kept = [None] * len(frame)
        for slot in self._results:
            kept[slot] = graph.frame[slot]
        return _CapturedGraph(tensors, counts, kept, replay)


def _rows(value: torch.Tensor) -> int:
    """How many tokens, or rows of features, a tensor has."""
    return prod(value.shape[:-1] if value.is_floating_point() else value.shape)


def _fill(graph: _CapturedGraph, call: _Call) -> None:
    """Copy what changes from call to call to where the graph reads it."""
    for slot, static in graph.tensors.items():
        static.copy_(call.tensors[slot], non_blocking=True)
    for slot, static in graph.counts.items():
        static.copy_(call.lengths[slot].counts(), non_blocking=True)


def _growth(call: _Call) -> dict[int, int] | None:
    """How many tokens a call has appended to each of its caches; None if that is not one number for all sequences and layers."""
    found: dict[int, int] = {}
    for slot, cache in call.caches.items():
        before = call.lengths[slot].values
        grown = {after - n for layer in cache for n, after in zip(before, layer.lengths.values, strict=True)}
        if len(grown) > 1:
            return None
        found[slot] = grown.pop() if grown else 0
    return found


def _bound(kept: OrderedDict[Hashable, Any], used: Hashable, count: int) -> None:
    """Keep what was used last."""
    kept.move_to_end(used)
    while len(kept) > count:
        kept.popitem(last=False)
