# SPDX-License-Identifier: Apache-2.0
"""The types of values: tensor, shape, scalar, tuple, state (a cache and its layers), object, function.

All are immutable and compare by meaning: two tensor types are equal if dtype and every axis are provably the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from nnfront import dtypes
from nnfront.dims import Dim, Size, Symbol, same_shape


@dataclass(frozen=True, slots=True, eq=False)
class TensorType:
    """A tensor: one size (int or Dim) for each axis, and a dtype name."""

    shape: tuple[Size, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def static_shape(self) -> tuple[int, ...] | None:
        """The shape where all its sizes are numbers, else None."""
        sizes = tuple(size for size in self.shape if isinstance(size, int))
        return sizes if len(sizes) == len(self.shape) else None

    @property
    def size_bytes(self) -> int | None:
        """Bytes of its elements; None where the shape is not static."""
        sizes = self.static_shape
        return None if sizes is None else prod(sizes) * dtypes.size_bytes(self.dtype)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TensorType):
            return NotImplemented
        return self.dtype == other.dtype and same_shape(self.shape, other.shape)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class ShapeType:
    """A shape as a value: a tuple of sizes known by name."""

    sizes: tuple[Size, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShapeType):
            return NotImplemented
        return same_shape(self.sizes, other.sizes)

    def __hash__(self) -> int:
        return hash(("shape", self.sizes))


@dataclass(frozen=True, slots=True, eq=False)
class ScalarType:
    """A host scalar of dtype int64, float64 or bool; `value` is its size where one is known, so an input can define a dim."""

    dtype: str
    value: Size | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScalarType):
            return NotImplemented
        if self.dtype != other.dtype or (self.value is None) != (other.value is None):
            return False
        return self.value is None or other.value is None or same_shape((self.value,), (other.value,))

    def __hash__(self) -> int:
        return hash((self.dtype, self.value))


@dataclass(frozen=True, slots=True)
class TupleType:
    """A tuple; with `names` it is what a method that returns a dict returns, or what a weight transform returns."""

    fields: tuple[Type, ...]
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """What a layer keeps of each token, or of each sequence, under a name: its axes besides those of the batch and the tokens."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class StateLayerType:
    """One layer of what a model keeps between calls: buffers with a row for each of `max_seq` tokens, and buffers with one for each of `batch` sequences.

    Keys and values are two buffers [heads, size] of each token. `window` is the number of last positions that attention can still see,
    None for all of them.
    """

    per_token: tuple[Buffer, ...]
    per_sequence: tuple[Buffer, ...]
    batch: Size
    max_seq: Size
    window: int | None = None

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All of them, those of each token first."""
        return self.per_token + self.per_sequence

    @property
    def kind(self) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...], int | None]:
        """All but for how many sequences and tokens it is."""
        return self.per_token, self.per_sequence, self.window

    def __str__(self) -> str:
        """What it keeps, in words: `2 heads of 64 float32`, `latent 1 x 576 bfloat16`, with `a sequence` behind what it keeps once for each."""
        if self.is_kv and self.per_token[0].shape == self.per_token[1].shape and not self.per_sequence:
            return f"{self.kv_heads} heads of {self.head_size} {self.dtype}"
        texts = [f"{b.name} {' x '.join(map(str, b.shape))} {b.dtype}" for b in self.buffers]
        first = len(self.per_token)
        return ", ".join([*texts[:first], *(f"{text} a sequence" for text in texts[first:])])

    # Of a layer of keys and values.

    @property
    def is_kv(self) -> bool:
        """Whether all that it keeps of a token are keys and values, of as many heads and one dtype."""
        if [buffer.name for buffer in self.per_token] != ["keys", "values"]:
            return False
        keys, values = self.per_token
        return (
            keys.dtype == values.dtype
            and len(keys.shape) == len(values.shape) == 2
            and keys.shape[0] == values.shape[0]
        )

    @property
    def kv_heads(self) -> int:
        """How many heads the keys have."""
        return self.per_token[0].shape[0]

    @property
    def head_size(self) -> int:
        """Features of a key."""
        return self.per_token[0].shape[-1]

    @property
    def dtype(self) -> str:
        """The dtype of the keys."""
        return self.per_token[0].dtype

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, StateLayerType):
            return NotImplemented
        return self.kind == other.kind and same_shape(
            (self.batch, self.max_seq), (other.batch, other.max_seq)
        )

    def __hash__(self) -> int:
        return hash((self.per_token, self.per_sequence, self.batch, self.max_seq, self.window))


def kv_layer(
    kv_heads: int,
    head_size: int,
    dtype: str,
    batch: Size,
    max_seq: Size,
    window: int | None = None,
    value_size: int | None = None,
) -> StateLayerType:
    """Return a layer of keys and values, these of another size if there is a `value_size`."""
    sizes = {"keys": head_size, "values": head_size if value_size is None else value_size}
    buffers = tuple(Buffer(name, (kv_heads, size), dtype) for name, size in sizes.items())
    return StateLayerType(buffers, (), batch, max_seq, window)


@dataclass(frozen=True, slots=True)
class StateType:
    """What a model keeps between calls: one entry for each layer."""

    layers: tuple[StateLayerType, ...]


@dataclass(frozen=True, slots=True)
class ObjectType:
    """An opaque value that only external functions look into; `name` is its class, for messages."""

    name: str = "object"


@dataclass(frozen=True, slots=True)
class FunctionType:
    """The parameters' types and the result's type of a function."""

    params: tuple[Type, ...]
    result: Type


@dataclass(frozen=True, slots=True)
class FunctionName:
    """A function of the module as the attribute of an op, which calls it: `@step` in text."""

    name: str


Type: TypeAlias = (
    TensorType | ShapeType | ScalarType | TupleType | StateLayerType | StateType | ObjectType | FunctionType
)


def sizes_of(type: Type) -> Sequence[Size]:
    """Return every size in `type`, in the order in which the text form shows them."""
    if isinstance(type, TensorType):
        return type.shape
    match type:
        case ShapeType():
            return type.sizes
        case ScalarType():
            return () if type.value is None else (type.value,)
        case StateLayerType():
            return (type.batch, type.max_seq)
        case TupleType() | StateType():
            parts = type.fields if isinstance(type, TupleType) else type.layers
        case FunctionType():
            parts = (*type.params, type.result)
        case ObjectType():
            return ()
    return [size for part in parts for size in sizes_of(part)]


def type_symbols(type: Type) -> Iterator[Symbol]:
    """Yield the symbols of every size in `type`, each as often as it occurs."""
    return (symbol for size in sizes_of(type) if isinstance(size, Dim) for symbol in size.symbols)
