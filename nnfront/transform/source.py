# SPDX-License-Identifier: Apache-2.0
"""`Source`: where a weight transform reads from, one weight at a time. A checkpoint is one; a dict of tensors becomes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from nnfront.errors import LoadError
from nnfront.lower import TensorType


class Info(Protocol):
    """What is known of a tensor before it is read: what a header says of it, or a type of numbers."""

    @property
    def shape(self) -> Sequence[Any]: ...

    @property
    def dtype(self) -> str: ...


@runtime_checkable
class Source(Protocol):
    """Weights by name. What it returns may be memory that others see: it is never written to."""

    def info(self, name: str) -> Info:
        """Return shape and dtype without reading."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return one weight."""

    def joined(self, names: Sequence[str]) -> torch.Tensor:
        """Return the elements of several weights of one dtype, row-major, one weight after another, as a tensor of one axis."""
        return torch.cat([self.tensor(name).reshape(-1) for name in names])

    def part(self, name: str, axis: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return what lies in some ranges of an axis of one weight, in new memory; of a file nothing else is read."""
        return cut(self.tensor(name), axis, ranges)

    def copied_bytes(self, names: Sequence[str]) -> int:
        """Return how many bytes of new memory these weights take, joined if they are several."""
        return 0 if len(names) == 1 else sum(self.tensor(name).nbytes for name in names)


def stored_type(tensor: torch.Tensor) -> TensorType:
    """Return the type of a tensor in memory."""
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class TensorSource(Source):
    """Weights that are tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def info(self, name: str) -> Info:
        return stored_type(self.tensor(name))

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            raise LoadError(f"there is no weight {name!r}")
        return self.tensors[name]

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy one weight into `out`, of its shape; if the dtypes differ, values are converted."""
        out.copy_(self.tensor(name))


def cut(x: torch.Tensor, axis: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """A copy of what lies in some ranges of an axis."""
    return torch.cat([x.narrow(axis, begin, end - begin) for begin, end in ranges], axis)


def as_source(weights: Source | Mapping[str, torch.Tensor]) -> Source:
    """Return what is a source as it is, and a mapping of tensors as one."""
    return weights if isinstance(weights, Source) else TensorSource(weights)
