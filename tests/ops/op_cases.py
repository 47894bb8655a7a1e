# SPDX-License-Identifier: Apache-2.0
"""What strategies for ops are made of; `op_strategies` has them all.

Sizes are 0 to 4, dtypes all there are. Data is small: indices in range where an op needs them so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from nnfront.dtypes import DTYPES
from nnfront.ir.types import ScalarType, StateLayerType, StateType, TensorType, Type

Draw = Callable[[st.SearchStrategy[Any]], Any]

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
NUMBERS = FLOATS + INTEGERS
SIZES = st.sampled_from([0, 1, 2, 2, 3, 4])
SOME = st.sampled_from([1, 2, 3, 4])


@dataclass
class Case:
    """Operands and attributes of one call; `sizes` are the attributes whose ints are sizes."""

    operands: tuple[Any, ...]
    attrs: dict[str, Any]
    sizes: tuple[str, ...] = ()
    keeps_ones: bool = False  # the meaning depends on which sizes are known to be 1


class Layer:
    """One layer of a contiguous cache, as plainly as the protocol of `nnfront.ops.layer` allows."""

    def __init__(self, type: StateLayerType, stored: int = 0) -> None:
        self.type, self.window = type, type.window
        self.tokens = [
            _noise((type.batch, *b.shape[:-1], stored, b.shape[-1]), b.dtype) for b in type.per_token
        ]
        self.fixed = {b.name: _noise((type.batch, *b.shape), b.dtype) for b in type.per_sequence}
        self.count = stored

    def positions(self, seq: int) -> torch.Tensor:
        return torch.arange(self.count, self.count + seq).expand(self.type.batch, seq)

    def last_positions(self, seq: int) -> torch.Tensor:
        return self.positions(seq) - seq

    def append(self, *parts: torch.Tensor) -> None:
        pairs = zip(self.tokens, parts, strict=True)
        self.tokens = [torch.cat([old, new.movedim(1, -2)], -2) for old, new in pairs]
        self.count = self.tokens[0].shape[-2]

    def stored(self, index: int) -> torch.Tensor:
        return self.tokens[index]

    def key_positions(self) -> torch.Tensor:
        return torch.arange(self.count).expand(self.type.batch, -1)

    def read(self, name: str) -> torch.Tensor:
        return self.fixed[name]

    def write(self, name: str, value: torch.Tensor, seq: int) -> None:
        old = self.fixed[name]
        if value.shape != old.shape or value.dtype != old.dtype:
            raise ValueError(f"{name} is another tensor")
        self.fixed[name] = value


def _noise(shape: Sequence[int], dtype: str) -> torch.Tensor:
    return torch.randn(shape).to(getattr(torch, dtype))


def type_of(value: Any) -> Type | None:
    """Return the type of a value of a case."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return TensorType(tuple(value.shape), str(value.dtype).removeprefix("torch."))
    if isinstance(value, Layer):
        return value.type
    if isinstance(value, tuple):
        return StateType(tuple(layer.type for layer in value))
    if isinstance(value, bool):
        return ScalarType("bool")
    return ScalarType("float64") if isinstance(value, float) else ScalarType("int64", value)


def make(shape: Sequence[int], dtype: str, low: int = -3, high: int = 4) -> torch.Tensor:
    """Return a tensor of small numbers in [low, high)."""
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(int(low > 0), 2, tuple(shape)).bool()
    if dtype == "uint8":
        return torch.randint(max(low, 0), high, tuple(shape), dtype=kind)
    if kind.is_floating_point:
        return (torch.rand(tuple(shape)) * (high - low) + low).to(kind)
    return torch.randint(low, high, tuple(shape), dtype=kind)


def shape_of(
    draw: Draw, least: int = 0, most: int = 4, sizes: st.SearchStrategy[int] = SIZES
) -> tuple[int, ...]:
    return tuple(draw(st.lists(sizes, min_size=least, max_size=most)))


def rarely(draw: Draw) -> bool:
    return draw(st.integers(0, 9)) == 5


def dtype_of(draw: Draw, usual: Sequence[str] = NUMBERS) -> str:
    return str(draw(st.sampled_from(DTYPES if rarely(draw) else usual)))


def partner(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that broadcasts with `shape`, or rarely any shape."""
    if rarely(draw):
        return shape_of(draw)
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in kept)


def axis_in(draw: Draw, ndim: int) -> int:
    if ndim == 0 or rarely(draw):
        return int(draw(st.integers(-ndim - 1, ndim)))
    return int(draw(st.integers(-ndim, ndim - 1)))


def axes_in(draw: Draw, ndim: int) -> Any:
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return None
    return axis_in(draw, ndim) if kind == 1 else [axis_in(draw, ndim) for _ in range(draw(st.integers(1, 2)))]


CASES: dict[str, st.SearchStrategy[Case]] = {}


def case(*names: str) -> Callable[[Callable[..., Case]], None]:
    """Register a function of (draw, name) as the strategy of these ops."""

    def register(function: Callable[..., Case]) -> None:
        for name in names:
            assert name not in CASES, name
            CASES[name] = st.composite(function)(name)

    return register
