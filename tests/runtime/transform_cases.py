# SPDX-License-Identifier: Apache-2.0
"""Weight transforms for tests, a source that notes what is read, and a count of the memory that torch holds."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nnfront.ops  # noqa: F401 - declares the ops
from nnfront.backends.lowering import lower
from nnfront.dims import to_size
from nnfront.ir import OPS, FunctionBuilder, IRModule, Projection, TensorType, Tuple
from nnfront.lower import MethodProgram
from nnfront.transform.source import TensorSource


class Maker:
    """Writes a transform: `m.w` are the weights, `m.concat(a, b, dim=0)` binds a call of an op."""

    def __init__(self, weights: Mapping[str, TensorType]) -> None:
        self.builder = FunctionBuilder("transform_params")
        self.w = {name: self.builder.param(name, type, "weight") for name, type in weights.items()}

    def __getattr__(self, op: str) -> Callable[..., Any]:
        return lambda *args, **attrs: self.builder.call(OPS[op], *args, **attrs)


def typed(*shape: int | str, dtype: str = "float32") -> TensorType:
    return TensorType(tuple(map(to_size, shape)), dtype)


def types_of(weights: Mapping[str, torch.Tensor]) -> dict[str, TensorType]:
    return {name: typed(*w.shape, dtype=str(w.dtype).removeprefix("torch.")) for name, w in weights.items()}


def transform(weights: Mapping[str, TensorType], make: Callable[[Maker], Mapping[str, Any]]) -> MethodProgram:
    """The program of the transform whose results `make` returns by name."""
    maker = Maker(weights)
    results = make(maker)
    result = maker.builder.emit(Tuple(tuple(results.values()), tuple(results)))
    function = maker.builder.finish(result, "transform")
    return lower(IRModule([function])).transforms["transform_params"]


class NotingSource(TensorSource):
    """Notes each read, and keeps a weak reference to what it gave: `alive` says which weights are still held."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.events: list[str] = []
        self.given: list[tuple[str, Any]] = []

    def tensor(self, name: str) -> torch.Tensor:
        return self._note(f"read {name}", super().tensor(name).clone())

    def joined(self, names: Sequence[str]) -> torch.Tensor:
        return self._note(
            f"join {' '.join(names)}", torch.cat([self.tensors[name].reshape(-1) for name in names])
        )

    def _note(self, event: str, value: torch.Tensor) -> torch.Tensor:
        self.events.append(event)
        self.given.append((event, weakref.ref(value.untyped_storage())))
        return value

    @property
    def alive(self) -> list[str]:
        return [event for event, storage in self.given if storage() is not None]


class CopyingSource(TensorSource):
    """Like a source that converts while it reads: every weight is new memory."""

    def tensor(self, name: str) -> torch.Tensor:
        return super().tensor(name).clone()

    def copied_bytes(self, names: Sequence[str]) -> int:
        return sum(self.tensors[name].nbytes for name in names)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all memory that torch ops make inside it, and the most of them alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        old = {
            t.untyped_storage().data_ptr()
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in old:
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self.seen or not size:
            return
        self.now += size
        self.peak = max(self.peak, self.now)
        self.seen[key] = weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.now -= size
        del self.seen[key]


def quantized(**options):
    def make(m):
        parts = m.quantize(m.w["w"], **options)
        return {f"part{i}": m.builder.emit(Projection(parts, i)) for i in range(len(parts.type.fields))}

    return make
