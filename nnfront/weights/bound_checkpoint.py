# SPDX-License-Identifier: Apache-2.0
"""`BoundWeights`: a checkpoint under the names and dtypes that a model declares, as a check has matched them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from nnfront.errors import LoadError
from nnfront.ir import TensorType
from nnfront.transform.source import Info, TensorSource, stored_type
from nnfront.weights.check_result import CheckResult
from nnfront.weights.checkpoint import Checkpoint
from nnfront.weights.mapped_memory import CHUNK_BYTES, anonymous


class BoundWeights(Mapping[str, torch.Tensor]):
    """Weights by the model's names: aliases resolved, floats converted where the check allowed it. Nothing is read beforehand.

    A source of a weight transform, and a mapping from name to tensor. Raises LoadError if the check found problems.
    """

    def __init__(self, weights: Checkpoint | Mapping[str, torch.Tensor], found: CheckResult) -> None:
        self.weights = weights
        self._source = weights if isinstance(weights, Checkpoint) else TensorSource(weights)
        self.found = found
        found.raise_if_wrong(_where(weights))

    def info(self, name: str) -> TensorType:
        """Return shape and dtype as the model sees them."""
        stored = self.stored(self.found.sources[name])
        return TensorType(tuple(stored.shape), self.found.casts.get(name, stored.dtype))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a weight: a view of the file or the given tensor, or new memory if it is converted."""
        if name in self.found.casts:
            return self._converted([name]).view(self._shape(name))
        return self.weights[self.found.sources[name]]

    def joined(self, names: Sequence[str]) -> torch.Tensor:
        """Return the elements of weights, one weight after another, as a tensor of one axis; mapped where pages allow it."""
        if any(name in self.found.casts for name in names):
            return self._converted(names)
        return self._source.joined([self.found.sources[name] for name in names])

    def part(self, name: str, axis: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return what lies in some ranges of an axis of one weight, in new memory; of a file nothing else is read."""
        return self._source.part(self.found.sources[name], axis, ranges).to(self._dtype(name))

    def copied_bytes(self, names: Sequence[str]) -> int:
        """Return how many bytes of new memory these weights take, joined if they are several."""
        if any(name in self.found.casts for name in names):
            return sum(prod(self._shape(name)) for name in names) * self._dtype(names[0]).itemsize
        return self._source.copied_bytes([self.found.sources[name] for name in names])

    def check_ties(self, are_equal: Callable[[str, str], bool] | None = None) -> None:
        """Compare the bytes of weights that are stored under two names, or ask `are_equal`. Raises LoadError that lists the pairs that differ."""
        are_equal = are_equal or self._are_equal
        different = [pair for pair in self.found.ties if not are_equal(*pair)]
        if different:
            raise LoadError(
                "the checkpoint holds two values for one weight",
                details=[
                    f"{one!r} and {two!r} are tied in the model, but their bytes differ"
                    for one, two in different
                ],
                where=_where(self.weights),
                help="untie them in the model (tie_word_embeddings=false), or remove one of them from the checkpoint",
            )

    def is_alive(self, name: str) -> bool:
        """Whether a weight of this name is there, and has not been let go of by the caller whose tensor it is."""
        return name in self.found.sources and self.found.sources[name] in self.weights

    def borrowed(self) -> BoundWeights:
        """Return the same weights without keeping tensors of the caller's alive; files stay open."""
        is_file = isinstance(self.weights, Checkpoint)
        return self if is_file else BoundWeights(Borrowed(self.weights), self.found)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.found.sources:
            raise KeyError(name)
        return self.tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self.found.sources

    def __iter__(self) -> Iterator[str]:
        return iter(self.found.sources)

    def __len__(self) -> int:
        return len(self.found.sources)

    def stored(self, source: str) -> Info:
        """Return shape and dtype of a tensor as it is stored, by its name there."""
        return self._source.info(source)

    def _shape(self, name: str) -> list[int]:
        return [int(size) for size in self.stored(self.found.sources[name]).shape]

    def _dtype(self, name: str) -> torch.dtype:
        dtype = getattr(torch, self.info(name).dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _converted(self, names: Sequence[str]) -> torch.Tensor:
        """Read weights one after another into new memory, converting piece by piece."""
        dtype, counts = self._dtype(names[0]), [prod(self._shape(name)) for name in names]
        if not sum(counts):
            return torch.empty(0, dtype=dtype)
        out = torch.frombuffer(anonymous(sum(counts) * dtype.itemsize), dtype=dtype)
        for name, part in zip(names, torch.split(out, counts), strict=True):
            self._source.read_into(self.found.sources[name], part.view(self._shape(name)))
        return out

    def _are_equal(self, one: str, two: str) -> bool:
        a, b = (self.weights[name].reshape(-1).view(torch.uint8) for name in (one, two))
        return all(
            torch.equal(x, y)
            for x, y in zip(torch.split(a, CHUNK_BYTES), torch.split(b, CHUNK_BYTES), strict=True)
        )


class Borrowed(Mapping[str, torch.Tensor]):
    """Tensors that live as long as somebody else holds them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._refs = {name: TensorWeakRef(tensor) for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor | None = self._refs[name]()
        if tensor is None:
            raise KeyError(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return (name for name, ref in self._refs.items() if ref() is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def tensor_types(weights: Mapping[str, Any]) -> dict[str, TensorType]:
    """Return shape and dtype of tensors in memory. Raises LoadError for what is no tensor on the CPU."""
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise LoadError(f"weight {name!r} is a {type(tensor).__name__}, not a torch tensor")
        if not tensor.is_cpu:
            raise LoadError(
                f"weight {name!r} is on {tensor.device}, not on the CPU", help="move it with .cpu()"
            )
    return {name: stored_type(tensor) for name, tensor in weights.items()}


def _where(weights: Mapping[str, torch.Tensor]) -> str:
    return str(weights.path) if isinstance(weights, Checkpoint) else ""
