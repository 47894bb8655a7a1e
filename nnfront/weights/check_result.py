# SPDX-License-Identifier: Apache-2.0
"""What a check of a checkpoint against a model found: where each weight is, and every problem as a line of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nnfront.dims import Symbol
from nnfront.errors import LoadError
from nnfront.weights.name_hints import shortened

Kind: TypeAlias = Literal["missing", "unexpected", "shape", "dtype", "tied", "dim"]

_TITLES: dict[Kind, str] = {
    "missing": "missing",
    "unexpected": "unexpected",
    "shape": "of another shape",
    "dtype": "of another dtype",
    "tied": "tied but different",
    "dim": "dims without a value",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that does not fit: its kind, the tensor or dim, and a text that begins with its name."""

    kind: Kind
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found.

    `sources` maps each wanted name to the name in the checkpoint; `casts` holds the wanted dtype where it is not the stored one;
    `dims` the sizes of model-wide dims; `ties` pairs of stored names that must hold equal bytes; `ignored` and `unexpected`
    the stored names that nothing wants, allowed and not.
    """

    sources: Mapping[str, str]
    casts: Mapping[str, str]
    dims: Mapping[Symbol, int]
    ties: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]
    unexpected: tuple[str, ...]
    problems: tuple[Problem, ...]
    help: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def lines(self) -> list[str]:
        """One line for each problem, by kind; many of one kind are grouped."""
        of_kind = {kind: [(p.name, p.text) for p in self.problems if p.kind == kind] for kind in _TITLES}
        return [f"{kind}: {line}" for kind, found in of_kind.items() for line in shortened(found)]

    def raise_if_wrong(self, where: str = "") -> None:
        """Raise one LoadError that lists all problems; `where` is the checkpoint."""
        if self.problems:
            counts = Counter(problem.kind for problem in self.problems)
            parts = [f"{counts[kind]} {_TITLES[kind]}" for kind in _TITLES if kind in counts]
            raise LoadError(
                f"the checkpoint does not fit the model: {', '.join(parts)}",
                details=self.lines(),
                where=where,
                help=self.help,
            )
