# SPDX-License-Identifier: Apache-2.0
"""What a session holds, and the way back from there to the weights that a checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from nnfront.dims import Symbol, evaluate
from nnfront.errors import DimError, LoadError
from nnfront.ir import TensorType
from nnfront.lower import Program
from nnfront.transform.formula import formulas
from nnfront.transform.inverse import Inverse
from nnfront.transform.weight_usage import weight_uses

Results = Mapping[str, Mapping[str, Any]]
"""The results of transforms, by the transform's name and theirs."""


class Layout:
    """How the weights of a checkpoint lie in what a session holds; it stays the same whatever their values are."""

    def __init__(self, program: Program, results: Results, dims: Mapping[Symbol, int]) -> None:
        """`dims` are the sizes that weights have said."""
        self.program = program
        self.transforms = {name: program.transforms[name] for name in results if name in program.transforms}
        self._dims = dims
        self._bare = {transform: _without_data(found) for transform, found in results.items()}

    @cached_property
    def wanted(self) -> Mapping[str, TensorType]:
        """The types of the checkpoint's weights under the model's names, as the model declares them."""
        return weight_uses(self.program).wanted

    @cached_property
    def sources(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """The weights that each result of each transform is made of."""
        return {
            transform: {name: parts for name, _, _, parts in formulas(program)}
            for transform, program in self.transforms.items()
        }

    def type(self, name: str) -> TensorType:
        """Return the type of a weight, its sizes as numbers. Raises LoadError if nothing says one of them."""
        wanted = self.wanted[name]
        try:
            return TensorType(tuple(evaluate(size, self._sizes) for size in wanted.shape), wanted.dtype)
        except DimError as error:
            raise LoadError(f"the shape of weight {name!r} is not known: {error.what}") from None

    def is_kept(self, name: str) -> bool:
        """Whether the session gives a weight back, bit for bit."""
        return name in self._raw or any(
            each.has(name) and each.weight(name) is not None for each in self._inverses
        )

    def why_lost(self, name: str) -> str:
        """Say in words why the session does not give a weight back."""
        return next(each.why_lost(name) for each in self._inverses if each.has(name))

    @cached_property
    def _raw(self) -> set[str]:
        methods = self.program.methods.values()
        return {w.name for method in methods for w in method.weights if w.role == "weight"}

    @cached_property
    def _inverses(self) -> tuple[Inverse, ...]:
        return tuple(Inverse(program, self._bare[name]) for name, program in self.transforms.items())

    @cached_property
    def _sizes(self) -> dict[Symbol, int]:
        return {symbol: n for each in self._inverses for symbol, n in each.dims.items()} | dict(self._dims)


def _without_data(results: Mapping[str, Any]) -> dict[str, Any]:
    """The same shapes and dtypes on the meta device, where nothing is computed."""
    return {
        name: torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value
        for name, value in results.items()
    }


@dataclass(frozen=True)
class SessionWeights:
    """One state of a session's weights. An update makes a new one, which shares what has not changed.

    `raw` are the weights that methods read as they are. `given` is what updates have brought that the results do not give back
    and that a later update may need; `updated` are the names of all that updates have brought.
    """

    layout: Layout
    raw: Mapping[str, Any]
    results: Results
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)
    updated: frozenset[str] = frozenset()

    @cached_property
    def weights(self) -> Mapping[str, Any]:
        """All that is held, by name; with several transforms a result's name begins with its transform's."""
        prefixed = len(self.results) > 1
        named = {
            f"{t}.{n}" if prefixed else n: value
            for t, found in self.results.items()
            for n, value in found.items()
        }
        return MappingProxyType({**self.raw, **named})


class WeightRecovery:
    """The weights of a checkpoint out of what a session holds, each when it is asked for. For one thread."""

    def __init__(self, current: SessionWeights) -> None:
        self.current = current
        self._inverses = [Inverse(p, current.results[name]) for name, p in current.layout.transforms.items()]

    def weight(self, name: str) -> torch.Tensor | None:
        """Return a weight as it was given, a view where possible; None if what is held does not give it back."""
        if name in self.current.raw:
            found: torch.Tensor = self.current.raw[name]
            return found
        values = (each.weight(name) for each in self._inverses if each.has(name))
        return next((value for value in values if value is not None), None)
