# SPDX-License-Identifier: Apache-2.0
"""New values for some weights of a session: what depends on them is made again, everything else stays the object that it was.

Results of a transform may need other weights as well. Those come from what the session holds, where that gives them back bit for
bit, else from an earlier update, else from the checkpoint that the session was made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from nnfront.backends.backend import Upload
from nnfront.errors import LoadError
from nnfront.ir import TensorType
from nnfront.transform.run import stream_transform
from nnfront.transform.source import Source
from nnfront.weights.bound_checkpoint import BoundWeights, tensor_types
from nnfront.weights.check import check_weights
from nnfront.weights.name_hints import nearest
from nnfront.weights.session_weights import Layout, Results, SessionWeights, WeightRecovery


def renew(
    current: SessionWeights,
    given: Mapping[str, torch.Tensor],
    sources: BoundWeights | None,
    *,
    cast: bool = False,
    send: Upload = lambda name, value: value,
) -> tuple[SessionWeights, Mapping[str, Any], Results]:
    """Return the state after an update, and the raw weights and results that are new in it; `current` and all tensors in it stay as they are. `send` puts values where methods read them.

    Raises LoadError that lists every name, shape and dtype that does not fit, and weights that are needed besides and not to be had.
    """
    layout = current.layout
    new = _checked(layout, given, sources, cast)
    stale = {
        transform: {name: parts for name, parts in results.items() if not new.keys().isdisjoint(parts)}
        for transform, results in layout.sources.items()
    }
    weights = _Weights(current, new, sources)
    weights.require(stale)
    weights.made |= {name: weights.tensor(name) for name in new if name in current.raw}
    raw = {name: send(name, value) for name, value in weights.made.items()}
    results = {
        transform: {
            name: send(name, value)
            for name, value in stream_transform(layout.transforms[transform], weights, only=names)
        }
        for transform, names in stale.items()
        if names
    }
    beside = {n for names in stale.values() for parts in names.values() if len(parts) > 1 for n in parts}
    kept = {name: weights.tensor(name) for name in new if name in beside and not layout.is_kept(name)}
    renewed = replace(
        current,
        raw={**current.raw, **raw},
        results={name: {**old, **results.get(name, {})} for name, old in current.results.items()},
        given={**current.given, **kept},
        updated=current.updated.union(new),
    )
    return renewed, raw, results


class _Weights(Source):
    """The checkpoint's weights after the update, as a source of transforms. What comes from the caller is copied: it stays the caller's."""

    def __init__(self, current: SessionWeights, new: BoundWeights, sources: BoundWeights | None) -> None:
        self.current = current
        self.new = new
        self.sources = sources
        self.back = WeightRecovery(current)
        self.made: dict[str, torch.Tensor] = {}

    def info(self, name: str) -> TensorType:
        return self.current.layout.type(name)

    def tensor(self, name: str) -> torch.Tensor:
        if name in self.made:
            return self.made[name]
        if name in self.new:
            value = self.new.tensor(name).detach()
            return (
                value if name in self.new.found.casts else value.clone(memory_format=torch.contiguous_format)
            )
        found = self.back.weight(name)
        if found is not None:
            return found.cpu()  # where transforms run, wherever methods do
        found = self.current.given.get(name)
        if found is None and self.sources is not None:
            found = self.sources.get(name)
        if found is None:
            raise LoadError(f"weight {name!r} was released during the update")
        return found

    def part(self, name: str, axis: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        is_stored = self.sources is not None and name in self.sources and name not in self.current.updated
        if is_stored and name not in self.new:
            return self.sources.part(name, axis, ranges)  # type: ignore[union-attr]
        return super().part(name, axis, ranges)

    def copied_bytes(self, names: Sequence[str]) -> int:
        return sum(self.tensor(name).nbytes for name in names if len(names) > 1 or name in self.new)

    def require(self, stale: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        """Raise LoadError if a result that is to be made again needs a weight that is not to be had."""
        missing: dict[str, str] = {}
        for names in stale.values():
            for result, parts in names.items():
                for name in parts:
                    if not self._has(name):
                        missing.setdefault(name, result)
        if missing:
            why = "the session has no checkpoint" if self.sources is None else "they are in memory no more"
            raise LoadError(
                "the update needs weights that are not to be had",
                details=[
                    f"{name!r}, to make {result!r} again: {self.current.layout.why_lost(name)}"
                    for name, result in missing.items()
                ],
                help=f"give them in the same update ({why})",
            )

    def _has(self, name: str) -> bool:
        return (
            name in self.new
            or self.current.layout.is_kept(name)
            or name in self.current.given
            or (self.sources is not None and self.sources.is_alive(name))
        )


def _checked(
    layout: Layout, given: Mapping[str, torch.Tensor], sources: BoundWeights | None, cast: bool
) -> BoundWeights:
    """Match the given tensors with the weights that they replace."""
    types = tensor_types(given)
    aliases = layout.program.aliases
    names = dict.fromkeys(aliases.get(name, name) for name in given)
    wanted = {name: layout.type(name) for name in names if name in layout.wanted}
    found = check_weights(wanted, types, aliases=aliases, cast=cast)
    lines = [f"unknown: {line}" for line in _unknown(layout, found.unexpected, sources)]
    problems = [p for p in found.problems if p.kind != "unexpected"]
    if lines or problems:
        kinds = {p.kind for p in problems}
        raise LoadError(
            "the update does not fit the model",
            details=[*lines, *(f"{p.kind}: {p.text}" for p in problems)],
            help="convert them, or update with cast=True"
            if kinds == {"dtype"} and not lines and not cast
            else "",
        )
    bound = BoundWeights(given, found)
    bound.check_ties()
    return bound


def _unknown(layout: Layout, names: Sequence[str], sources: BoundWeights | None) -> Iterator[str]:
    """A line for each name that is no weight's: what it is instead, or what it may have meant."""
    made = {name: parts for results in layout.sources.values() for name, parts in results.items()}
    unread = set(sources.found.ignored) if sources is not None else set()
    near = nearest(names, [*layout.wanted, *layout.program.aliases])
    for name in names:
        if name in made:
            yield f"{name!r} is made of {', '.join(map(repr, made[name]))}: give those"
        elif name in unread:
            yield f"{name!r} is in the checkpoint, but no method reads it"
        else:
            yield f"{name!r}" + (f"; nearest: {near[name]!r}" if name in near else "")
