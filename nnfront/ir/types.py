# SPDX-License-Identifier: Apache-2.0
"""The types of values: tensor, shape, scalar, tuple, cache, object, function.

All are immutable and compare by meaning: two tensor types are equal if dtype and every axis are provably the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

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


@dataclass(frozen=True, slots=True, eq=False)
class CacheLayerType:
    """One layer of a key/value cache: two buffers [batch, kv_heads, max_seq, head_size].

    `window` is the number of last positions that attention can still see, None for all of them.
    """

    kv_heads: int
    head_size: int
    dtype: str
    batch: Size
    max_seq: Size
    window: int | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, CacheLayerType):
            return NotImplemented
        mine = (self.kv_heads, self.head_size, self.dtype, self.window)
        return mine == (other.kv_heads, other.head_size, other.dtype, other.window) and same_shape(
            (self.batch, self.max_seq), (other.batch, other.max_seq)
        )

    def __hash__(self) -> int:
        return hash((self.kv_heads, self.head_size, self.dtype, self.batch, self.max_seq, self.window))


@dataclass(frozen=True, slots=True)
class CacheType:
    """A key/value cache: one entry for each layer."""

    layers: tuple[CacheLayerType, ...]


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
    TensorType | ShapeType | ScalarType | TupleType | CacheLayerType | CacheType | ObjectType | FunctionType
)


def sizes_of(type: Type) -> Iterator[Size]:
    """Yield every size in `type`, in the order in which the text form shows them."""
    match type:
        case TensorType():
            yield from type.shape
        case ShapeType():
            yield from type.sizes
        case ScalarType():
            if type.value is not None:
                yield type.value
        case TupleType():
            for field in type.fields:
                yield from sizes_of(field)
        case CacheLayerType():
            yield type.batch
            yield type.max_seq
        case CacheType():
            for layer in type.layers:
                yield from sizes_of(layer)
        case FunctionType():
            for param in type.params:
                yield from sizes_of(param)
            yield from sizes_of(type.result)
        case ObjectType():
            return


def type_symbols(type: Type) -> Iterator[Symbol]:
    """Yield the symbols of every size in `type`, each as often as it occurs."""
    return (symbol for size in sizes_of(type) if isinstance(size, Dim) for symbol in size.symbols)
