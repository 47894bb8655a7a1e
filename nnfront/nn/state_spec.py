# SPDX-License-Identifier: Apache-2.0
"""The specs of tensors, and of caches, which keep tensors: `nnfront.spec` has them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nnfront.dims import Dim, Size, to_size
from nnfront.errors import SpecError
from nnfront.ir import Buffer, StateLayerType, StateType
from nnfront.nn.mode import names_place
from nnfront.nn.shape import shape_of
from nnfront.ops.rules import dtype_name


class Tensor:
    """A tensor argument. `shape`: ints, dim names, dim expressions or Dims; `dtype`: a dtype name."""

    @names_place
    def __init__(self, shape: Sequence[int | str | Dim], dtype: str = "float32") -> None:
        self.shape: tuple[Size, ...] = shape_of(shape, "spec.Tensor")
        self.dtype: str = dtype_name(dtype)

    def __repr__(self) -> str:
        return f"Tensor([{', '.join(str(s) for s in self.shape)}], {self.dtype!r})"


@dataclass(frozen=True)
class Layer:
    """What one layer keeps: of each token and of each sequence, by name, axes besides those of tokens and batch, which are ints.

    `window`: how many last positions attention sees, None for all.
    """

    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    per_sequence: Mapping[str, Tensor] = field(default_factory=dict)
    window: int | None = None


@names_place
def KV(
    kv_heads: int,
    head_size: int,
    dtype: str = "float32",
    window: int | None = None,
    value_size: int | None = None,
) -> Layer:
    """A layer of keys and values: `kv_heads` heads of `head_size`, values of another size if there is a `value_size`."""
    sizes = {"keys": head_size, "values": head_size if value_size is None else value_size}
    return Layer({name: Tensor([kv_heads, size], dtype) for name, size in sizes.items()}, window=window)


class State:
    """A cache whose layers may differ in all but `batch` and `max_seq`: buffers of each token (keys and values, a latent) and of each sequence."""

    @names_place
    def __init__(
        self,
        layers: Sequence[Layer],
        batch: int | str | Dim = "batch",
        max_seq: int | str | Dim = "max_seq",
    ) -> None:
        if not layers or not all(isinstance(layer, Layer) for layer in layers):
            raise SpecError(
                "spec.State: layers is not a list of layers",
                help="spec.State([spec.KV(heads, size), spec.Layer(...)])",
            )
        self.layers = tuple(layers)
        self.batch = to_size(batch)
        self.max_seq = to_size(max_seq)
        self._kinds: dict[int, StateLayerType] = {}  # by id: mostly one and the same object
        for i, layer in enumerate(self.layers):
            if id(layer) not in self._kinds:
                self._kinds[id(layer)] = _layer_type(f"spec.State: layer {i}", layer)

    @property
    def type(self) -> StateType:
        """The type of the argument."""
        made = {
            key: replace(kind, batch=self.batch, max_seq=self.max_seq) for key, kind in self._kinds.items()
        }
        return StateType(tuple(made[id(layer)] for layer in self.layers))

    def __repr__(self) -> str:
        return f"State({list(self.layers)}, {self.batch}, {self.max_seq})"


class Cache(State):
    """A key/value cache argument: `layers` layers of `kv_heads` heads of `head_size`, for `batch` x `max_seq` tokens.

    `window`: how many last positions attention sees: an int or None for all layers, or one entry for each layer.
    """

    @names_place
    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_size: int,
        dtype: str = "float32",
        batch: int | str | Dim = "batch",
        max_seq: int | str | Dim = "max_seq",
        window: int | Sequence[int | None] | None = None,
    ) -> None:
        for name, count in (("layers", layers), ("kv_heads", kv_heads), ("head_size", head_size)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise SpecError(f"spec.Cache: {name} is {count!r}, not a positive int")
        self.windows = tuple(window) if isinstance(window, Sequence) else (window,) * layers
        if len(self.windows) != layers:
            raise SpecError(f"spec.Cache: {layers} layers but {len(self.windows)} windows")
        kinds = {each: KV(kv_heads, head_size, dtype, each) for each in self.windows}
        super().__init__([kinds[each] for each in self.windows], batch, max_seq)


def _layer_type(what: str, layer: Layer) -> StateLayerType:
    """What a layer keeps, for no sequences yet."""
    per_token, per_sequence = (
        tuple(_buffer(what, name, tensor, least) for name, tensor in group.items())
        for group, least in ((layer.per_token, 1), (layer.per_sequence, 0))
    )
    both = layer.per_token.keys() & layer.per_sequence.keys()
    if both or not per_token + per_sequence:
        problem = f"{min(both)!r} is kept of tokens and of sequences" if both else "it keeps nothing"
        raise SpecError(f"{what}: {problem}")
    if layer.window is not None and (type(layer.window) is not int or layer.window < 1):
        raise SpecError(f"{what}: window is {layer.window!r}, expected a positive int or None")
    return StateLayerType(per_token, per_sequence, 0, 0, layer.window)


def _buffer(what: str, name: str, tensor: Any, least: int) -> Buffer:
    """A buffer with at least so many axes."""
    shape = tuple(s for s in tensor.shape if type(s) is int and s > 0) if isinstance(tensor, Tensor) else None
    if shape is None or len(shape) < len(tensor.shape):
        raise SpecError(f"{what}: {name!r} is {tensor!r}, expected spec.Tensor of positive ints")
    if len(shape) < least:
        raise SpecError(f"{what}: {name!r} has no axis, expected one at least of what is kept of each token")
    return Buffer(name, shape, tensor.dtype)
