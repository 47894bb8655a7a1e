# SPDX-License-Identifier: Apache-2.0
"""Prove from headers alone that every weight a model wants is there, once, with its shape and dtype, and nothing is left over."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nnfront import dtypes
from nnfront.dims import Dim, Size, Symbol, describe_facts, determined, evaluate, of_symbol, satisfies, solve
from nnfront.errors import DimError
from nnfront.ir import TensorType, type_text
from nnfront.transform.source import Info
from nnfront.weights.check_result import CheckResult, Kind, Problem
from nnfront.weights.name_hints import SHOWN, common_prefix, nearest

_NOTHING: Mapping[Any, Any] = MappingProxyType({})


def check_weights(
    wanted: Mapping[str, TensorType],
    have: Mapping[str, Info],
    *,
    aliases: Mapping[str, str] = _NOTHING,
    ignored: Sequence[str] = (),
    cast: bool = False,
    needed_by: Mapping[str, Sequence[str]] = _NOTHING,
    dims: Mapping[Symbol, int] = _NOTHING,
) -> CheckResult:
    """Compare what a model wants with what a checkpoint holds. Nothing is raised; the result has all problems at once.

    Dims in wanted shapes are model-wide: one value each, found from the stored shapes, else given by `dims`. Those that no shape
    can tell, as m and n in `m*n`, are left to the arguments of calls; all sizes have to agree about `m*n`. `aliases` maps other names of a tied
    weight to its name; the checkpoint may hold any of them. `ignored` are names or patterns (`*.inv_freq`) of tensors that may
    be left over. With `cast` a float weight may be stored in another float dtype of 16 bits or more. `needed_by` says for a
    wanted name which methods read it.
    """
    check = _Check(wanted, have, cast, needed_by, dims)
    check.find_sources(aliases)
    check.find_left_over(aliases, ignored)
    check.compare_dtypes()
    check.solve_dims()
    check.report_missing()
    check.compare_shapes()
    return check.result()


@dataclass
class _Check:
    wanted: Mapping[str, TensorType]
    have: Mapping[str, Info]
    cast: bool
    needed_by: Mapping[str, Sequence[str]]
    given: Mapping[Symbol, int]
    sources: dict[str, str] = field(default_factory=dict)
    casts: dict[str, str] = field(default_factory=dict)
    dims: dict[Symbol, int] = field(default_factory=dict)
    said_by: dict[Symbol, str] = field(default_factory=dict)
    ties: list[tuple[str, str]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, kind: Kind, name: str, text: str) -> None:
        self.problems.append(Problem(kind, name, f"{name!r}: {text}"))

    def find_sources(self, aliases: Mapping[str, str]) -> None:
        """Give each wanted weight its stored name; further stored names of it become ties."""
        names: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            names.setdefault(name, []).append(alias)
        for name in self.wanted:
            found = [stored for stored in (name, *names.get(name, ())) if stored in self.have]
            if not found:
                continue
            self.sources[name] = found[0]
            for other in found[1:]:
                one, two = self.have[found[0]], self.have[other]
                if (tuple(one.shape), one.dtype) == (tuple(two.shape), two.dtype):
                    self.ties.append((found[0], other))
                else:
                    self.add(
                        "tied",
                        other,
                        f"{_text(two)}, but {found[0]!r} is {_text(one)} and both are one weight",
                    )

    def find_left_over(self, aliases: Mapping[str, str], ignored: Sequence[str]) -> None:
        """Sort the stored tensors that nothing wants into allowed and unexpected."""
        allowed = re.compile("|".join(fnmatch.translate(each) for each in ignored) or r"(?!)")
        used = set(self.sources.values())
        for name, stored in self.have.items():
            if name in used or aliases.get(name) in self.wanted:
                continue
            if allowed.match(name):
                self.ignored.append(name)
            else:
                self.unexpected.append(name)
                self.add("unexpected", name, _text(stored))

    def compare_dtypes(self) -> None:
        for name, source in self.sources.items():
            got, expected = self.have[source].dtype, self.wanted[name].dtype
            if got == expected:
                continue
            if self.cast and _is_castable(got) and _is_castable(expected):
                self.casts[name] = expected
            else:
                self.add(
                    "dtype", source, f"{_text(self.have[source])}, expected {type_text(self.wanted[name])}"
                )

    def solve_dims(self) -> None:
        """Find a value for each dim: what most axes say that are nothing but the dim, then what follows from the others."""
        votes: dict[Symbol, Counter[int]] = {}
        places: dict[tuple[Symbol, int], str] = {}
        equations: dict[tuple[Size, int], None] = {}
        for name, source in self.sources.items():
            for axis, (size, got) in enumerate(_axes(self.wanted[name], self.have[source])):
                if not isinstance(size, Dim):
                    continue
                equations[size, got] = None
                symbol = size.symbols[0]
                if str(size) == symbol.name:
                    votes.setdefault(symbol, Counter())[got] += 1
                    places.setdefault((symbol, got), f"{source!r} axis {axis}")
        for symbol, counter in votes.items():
            self.dims[symbol] = value = counter.most_common(1)[0][0]
            self.said_by[symbol] = places[symbol, value]
            if satisfies(value, symbol) is False:
                self.add(
                    "dim",
                    symbol.name,
                    f"is {value} by {places[symbol, value]}, but is {describe_facts(*symbol.facts)}",
                )
        left = [(s, n) for s, n in equations if isinstance(s, Dim) and not self.knows(s)]
        for symbol in dict.fromkeys(symbol for size, _ in left for symbol in size.symbols):
            if symbol not in self.dims and symbol in self.given:
                self.dims[symbol] = self.given[symbol]
            if symbol in self.dims:
                left.append((of_symbol(symbol), self.dims[symbol]))
        try:
            self.dims |= solve(left)
        except DimError as error:
            self.add("dim", "dims", "; ".join((error.what, *error.details)))

    def knows(self, size: Dim) -> bool:
        """Whether all symbols of the size have a value."""
        return all(symbol in self.dims for symbol in size.symbols)

    def compare_shapes(self) -> None:
        unknown: dict[Symbol, str] = {}
        told = determined([size for wanted in self.wanted.values() for size in wanted.shape])
        for name, source in self.sources.items():
            wanted, stored = self.wanted[name], self.have[source]
            symbols = [s for size in wanted.shape if isinstance(size, Dim) for s in size.symbols]
            missing = [symbol for symbol in symbols if symbol not in self.dims]
            unknown |= {symbol: source for symbol in missing if symbol in told}
            if len(wanted.shape) == len(stored.shape) and self.fits(wanted, stored):
                continue
            notes = [
                f"{s} is {self.dims[s]} by {self.said_by[s]}"
                for s in dict.fromkeys(symbols)
                if s in self.said_by
            ]
            ranks = len(wanted.shape), len(stored.shape)
            if (
                ranks == (2, 2)
                and not missing
                and self.fits(wanted, TensorType(tuple(stored.shape[::-1]), stored.dtype))
            ):
                notes.append("the stored one is its transpose")
            self.add("shape", source, "; ".join([f"{_text(stored)}, expected {type_text(wanted)}", *notes]))
        if not self.problems:  # else it may follow from another problem
            for symbol, source in unknown.items():
                self.add(
                    "dim", symbol.name, f"no weight gives it a value; it is part of the shape of {source!r}"
                )

    def fits(self, wanted: TensorType, stored: Info) -> bool:
        """Whether a stored shape of the same rank is the wanted one under the dims found, as far as they say."""
        try:
            return all(
                evaluate(size, self.dims) == got
                for size, got in _axes(wanted, stored)
                if not isinstance(size, Dim) or self.knows(size)
            )
        except DimError:  # a division by a dim that is 0
            return False

    def report_missing(self) -> None:
        missing = [name for name in self.wanted if name not in self.sources]
        near = nearest(missing[: 4 * SHOWN], self.unexpected)
        for name in missing:
            text = type_text(self.wanted[name])
            if self.needed_by.get(name):
                text += f", needed by {', '.join(self.needed_by[name])}"
            if name in near:
                text += f"; nearest unexpected: {near[name]!r}"
            self.add("missing", name, text)

    def result(self) -> CheckResult:
        return CheckResult(
            self.sources,
            self.casts,
            self.dims,
            tuple(self.ties),
            tuple(self.ignored),
            tuple(self.unexpected),
            tuple(self.problems),
            self.help(),
        )

    def help(self) -> str:
        kinds = {problem.kind for problem in self.problems}
        missing = [problem.name for problem in self.problems if problem.kind == "missing"]
        if kinds == {"unexpected"}:
            return "name tensors that the model does not need as ignored, by name or pattern"
        if kinds == {"dtype"} and not self.cast:
            seen = {d for n, s in self.sources.items() for d in (self.have[s].dtype, self.wanted[n].dtype)}
            return (
                "load with cast=True, or LLM.load with dtype=..., to convert while loading"
                if all(map(_is_castable, seen))
                else ""
            )
        return common_prefix(missing, self.unexpected)


def _text(stored: Info) -> str:
    return f"{stored.dtype}[{', '.join(map(str, stored.shape))}]"


def _axes(wanted: TensorType, stored: Info) -> list[tuple[Size, int]]:
    """Wanted and stored size of each axis; empty if the ranks differ."""
    if len(wanted.shape) != len(stored.shape):
        return []
    return list(zip(wanted.shape, stored.shape, strict=True))


def _is_castable(dtype: str) -> bool:
    """Whether values of this dtype mean the same in another one; those of 8 bits need a scale that is stored elsewhere."""
    return dtype in dtypes.DTYPES and dtypes.is_float(dtype) and dtypes.size_bytes(dtype) >= 2
