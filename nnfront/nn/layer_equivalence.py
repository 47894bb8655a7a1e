# SPDX-License-Identifier: Apache-2.0
"""Which modules may share one traced body: those that agree in everything the first trace read.

While a shareable module is traced, a `ReadLog` notes each attribute that is read from it and from the modules below it.
Another module may call the traced body if reading the same attributes from it gives the same values, and tensors of the
same types in the same places. What cannot be compared exactly is never shared. A class of
immutable objects may say `compared_by_identity = True`.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import types
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch

from nnfront.dims import Dim, same
from nnfront.nn.pytree import LEAF
from nnfront.nn.tensor import Tensor

_MAX_DEPTH = 8  # of nested containers and objects; deeper ones are not compared
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_BY_IDENTITY = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, torch.dtype, np.dtype)

_recorder: ContextVar[ReadLog | None] = ContextVar("recorder", default=None)


ABSENT: Any = object()  # what reading an attribute that is not there gives

_NOTHING: Any = object()


class CannotShare(Exception):
    """Something was read that cannot be compared; the module is traced in place instead."""


class _Seen(NamedTuple):
    """What was read: a kind, a class, and what the kind needs. Reads that agree are equal."""

    kind: str  # absent, module, tensor, constant, plain, dim, same, list, dict, object
    cls: type
    value: Any = None


class ReadLog:
    """The reads of one trace of one module, in order.

    `tensors` are the weights in the order in which they were first read; a slot is an index into it.
    """

    def __init__(self, root: Any, outer: ReadLog | None) -> None:
        self.outer = outer
        self.reads: list[tuple[tuple[Any, ...], str, _Seen, Any]] = []
        self.tensors: list[Tensor] = []
        self.failed = False
        self._modules: dict[tuple[Any, ...], Any] = {(): root}
        self._paths: dict[int, tuple[Any, ...]] = {id(root): ()}
        self._known: set[tuple[int, str]] = set()
        self._slots: dict[int, int] = {}

    def note(self, owner: Any, name: str, value: Any) -> None:
        """Note that attribute `name` of the module `owner` was read and was `value`."""
        path = self._paths.get(id(owner))
        if path is None or (id(owner), name) in self._known:
            return
        self._known.add((id(owner), name))
        try:
            seen = self._see(value, (*path, name), 0)
        except CannotShare:
            self.failed = True
            return
        # Meeting the very object again settles the question, if it can never change.
        self.reads.append((path, name, seen, value if seen.kind in ("plain", "same") else _NOTHING))

    def note_all(self, owner: Any) -> None:
        """Note that the whole state of the module `owner` was read: such a trace is not shared."""
        self.failed = self.failed or id(owner) in self._paths

    def _see(self, value: Any, path: tuple[Any, ...], depth: int) -> _Seen:
        cls = type(value)
        if value is ABSENT:
            return _Seen("absent", cls)
        if depth > _MAX_DEPTH:
            raise CannotShare
        if hasattr(cls, "named_parameters") and hasattr(cls, "forward"):  # a Module, which this need not know
            first = self._paths.setdefault(id(value), path)
            self._modules.setdefault(first, value)
            return _Seen("module", cls, first)
        if isinstance(value, Tensor) and not isinstance(value.content, torch.Tensor):
            slot = self._slots.setdefault(id(value), len(self.tensors))
            if slot == len(self.tensors):
                self.tensors.append(value)
            return _Seen("tensor", cls, (slot, value.type))
        if cls in (list, tuple):
            return _Seen("list", cls, tuple(self._see(v, (*path, i), depth + 1) for i, v in enumerate(value)))
        if cls is dict:
            return _Seen(
                "dict", cls, tuple((_plain(k), self._see(v, (*path, k), depth + 1)) for k, v in value.items())
            )
        seen = _leaf(value)
        if seen is not None:
            return seen
        fields = _fields(value)
        return _Seen("object", cls, {k: self._see(v, (*path, k), depth + 1) for k, v in fields.items()})

    def match(self, root: Any) -> list[Tensor] | None:
        """Return the weights of `root` in slot order if it agrees in everything that was read, else None."""
        other = ReadLog(root, None)
        for path, name, seen, immutable in self.reads:
            value = getattr(other._modules[path], name, ABSENT)
            if value is immutable:
                continue
            try:
                if other._see(value, (*path, name), 0) != seen:
                    return None
            except CannotShare:
                return None
        return other.tensors


def _plain(value: Any) -> tuple[type, str]:
    """A key that tells 1 from True, 0.0 from -0.0, and one nan from none."""
    if type(value) not in _PLAIN:
        raise CannotShare
    return type(value), repr(value)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """A dim, which equals those of its own form alone."""

    dim: Dim

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Form) and same(self.dim, other.dim)


def static_key(structure: Any) -> Any:
    """Return a key for what is left of a structure without its leaves. Raises CannotShare for what cannot be compared."""
    if structure is LEAF:
        return LEAF
    if isinstance(structure, (tuple, list)):
        return (type(structure), *map(static_key, structure))
    if isinstance(structure, dict):
        return (dict, *((_plain(k), static_key(v)) for k, v in structure.items()))
    if isinstance(structure, Dim):
        return structure
    if isinstance(structure, (enum.Enum, torch.dtype)):
        return structure
    return _plain(structure)


def _leaf(value: Any) -> _Seen | None:
    """What a value without parts is, None if it has parts."""
    cls = type(value)
    if cls in _PLAIN:
        return _Seen("plain", cls, _plain(value))
    if cls is Dim:
        return _Seen("dim", cls, _Form(value))
    if (
        isinstance(value, enum.Enum)
        or getattr(cls, "compared_by_identity", False)
        or (isinstance(value, _BY_IDENTITY) and not getattr(value, "__closure__", None))
    ):
        return _Seen("same", cls, (id(value), value))
    if isinstance(value, (torch.Tensor, Tensor, np.ndarray)):
        return _Seen("constant", cls, _bytes(value))
    return None


def _bytes(value: Any) -> tuple[Any, ...]:
    """Dtype, shape and elements of a constant."""
    data = value.content if isinstance(value, Tensor) else value
    if isinstance(data, np.ndarray):
        return str(data.dtype), data.shape, data.tobytes()
    assert isinstance(data, torch.Tensor)
    if data.device.type == "meta":
        raise CannotShare
    flat = data.detach().contiguous().reshape(-1)
    return str(data.dtype), tuple(data.shape), flat.view(torch.uint8).numpy().tobytes()


def _fields(value: Any) -> dict[str, Any]:
    """The state of an object that keeps all of it in `__dict__` or in dataclass fields."""
    if isinstance(value, types.FunctionType) or type(value).__module__ == "builtins":
        raise CannotShare
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    state = getattr(value, "__dict__", None)
    if state is None or _has_hidden_state(type(value)):
        raise CannotShare
    return dict(state)


def _has_hidden_state(cls: type) -> bool:
    """Whether instances hold more than their `__dict__`: slots, or a base written in C (iterators, random generators)."""
    return any("__slots__" in vars(base) and vars(base)["__slots__"] for base in cls.__mro__) or any(
        base is not object and not (base.__flags__ & (1 << 9)) for base in cls.__mro__
    )


# How many recorders are active in all threads: attribute reads look at the context variable only when there is one.
_active = 0
_active_lock = threading.Lock()


def current_recorder() -> ReadLog | None:
    """Return the recorder of this context, None while nothing is recorded."""
    return _recorder.get() if _active else None


def start_recording(recorder: ReadLog) -> Any:
    """Make `recorder` the one that notes reads in this context; returns what `stop_recording` wants."""
    global _active
    with _active_lock:
        _active += 1
    return _recorder.set(recorder)


def stop_recording(token: Any) -> None:
    """End what `start_recording` began."""
    global _active
    with _active_lock:
        _active -= 1
    _recorder.reset(token)


def note_read(owner: Any, name: str, value: Any) -> None:
    """Note a read with every active recorder."""
    recorder = _recorder.get()
    while recorder is not None:
        recorder.note(owner, name, value)
        recorder = recorder.outer


def note_all_read(owner: Any) -> None:
    """Note that all of a module's state was read at once: then nothing is known of what mattered."""
    recorder = _recorder.get()
    while recorder is not None:
        recorder.note_all(owner)
        recorder = recorder.outer
