# SPDX-License-Identifier: Apache-2.0
"""Random expressions with a meaning that owes nothing to the room under test: Python's own evaluation of their text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypothesis import reject
from hypothesis import strategies as st

from nnfront.dims import Dim, Size, Symbol, parse, with_facts
from nnfront.errors import DimError

NAMES = ("a", "b", "c")
PYTHON = {
    "floordiv": lambda x, y: x // y,
    "ceildiv": lambda x, y: -(-x // y),
    "mod": lambda x, y: x % y,
    "min": min,
    "max": max,
}


@dataclass(frozen=True)
class Facts:
    """What is known about one name, and the small values that agree with it."""

    low: int
    high: int | None
    step: int

    def values(self) -> list[int]:
        high = self.low + 9 if self.high is None else self.high
        found = [value for value in range(self.low, high + 1) if value % self.step == 0]
        return found or [-(-self.low // self.step) * self.step]


@st.composite
def facts(draw: st.DrawFn) -> Facts:
    step = draw(st.sampled_from([1, 1, 2, 3, 4]))
    low = draw(st.integers(0, 4))
    first = -(-low // step) * step
    return Facts(low, draw(st.none() | st.integers(first, first + 8)), step)


def worlds() -> st.SearchStrategy[dict[str, Facts]]:
    """Facts for each of the names."""
    return st.fixed_dictionaries({name: facts() for name in NAMES})


def points(world: dict[str, Facts]) -> Iterator[dict[str, int]]:
    """All small assignments inside the facts."""
    for values in itertools.product(*(world[name].values() for name in NAMES)):
        yield dict(zip(NAMES, values, strict=True))


def value(text: str, point: dict[str, int]) -> int | None:
    """Python's value of the text, None where it divides by zero."""
    try:
        return int(eval(text, dict(PYTHON), point))
    except ZeroDivisionError:
        return None


def place(text: str, world: dict[str, Facts]) -> Size:
    """The size of the text with the facts of its names."""
    known = {Symbol(name): Symbol(name, 0, f.low, f.high, f.step) for name, f in world.items()}
    return with_facts(parse(text), known)


def size_or_reject(build: Callable[[], Size]) -> Size:
    """The size, unless the expression divides by what is certainly 0: then hypothesis should try another."""
    try:
        return build()
    except DimError as error:
        if "division by zero" not in error.what:
            raise
        reject()


def named(name: str, world: dict[str, Facts]) -> Dim:
    f = world[name]
    return Dim(name, min=f.low, max=f.high, multiple_of=f.step)


def _binary(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pair = st.tuples(children, children)
    return st.one_of(
        st.tuples(children, st.sampled_from(["+", "-", "*", "//", "%"]), children).map(
            lambda x: f"({x[0]} {x[1]} {x[2]})"
        ),
        st.tuples(children, st.sampled_from(["//", "%"]), st.integers(1, 6)).map(
            lambda x: f"({x[0]} {x[1]} {x[2]})"
        ),
        st.tuples(st.sampled_from(list(PYTHON)), pair).map(lambda x: f"{x[0]}({x[1][0]}, {x[1][1]})"),
        children.map(lambda x: f"(-{x})"),
    )


def expressions(max_leaves: int = 6) -> st.SearchStrategy[str]:
    """Texts over the names with every operator and function."""
    leaves = st.sampled_from(NAMES) | st.integers(0, 6).map(str) | st.sampled_from(["2*a", "3*b", "4*c"])
    return st.recursive(leaves, _binary, max_leaves=max_leaves)


def polynomials(max_leaves: int = 8) -> st.SearchStrategy[str]:
    """Texts with + - * only."""
    leaves = st.sampled_from(NAMES) | st.integers(0, 4).map(str)
    return st.recursive(
        leaves,
        lambda children: st.tuples(children, st.sampled_from("+-*"), children).map(
            lambda x: f"({x[0]} {x[1]} {x[2]})"
        ),
        max_leaves=max_leaves,
    )
