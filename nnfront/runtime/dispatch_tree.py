# SPDX-License-Identifier: Apache-2.0
"""The way of a call through a method: code that asks, and at the end the code of the case that is taken.

A method whose body ends with the choice among its special cases is a tree. What a leaf gives goes straight to the caller, as it does
from a method without cases: no copy, and nothing on the way but the questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nnfront.lower import Block, Branch, Run
from nnfront.runtime.execute import Code, Frame, Step
from nnfront.runtime.results import split_results

ENTER = "enter_case"
"""The op that says which case runs."""


@dataclass(frozen=True, slots=True)
class Route:
    """Code to run, then either a slot that says which way to go on, or at a leaf (-1) the code that makes the results.

    `cases` are those that lie ahead.
    """

    code: Code
    last: Code
    condition: int = -1
    ways: tuple[Route, ...] = ()  # where to go if the condition does not hold, and if it does
    cases: frozenset[str] = frozenset()

    def only(self, case: str) -> Route:
        """Return the route that leads to one case whatever the conditions say."""
        if self.condition < 0:
            return self
        way = next(way for way in self.ways if case in way.cases).only(case)
        return replace(self, ways=(way, way), cases=way.cases)


def find_route(
    block: Block, prepared: Callable[[Block], Code], moves: Mapping[int, int] | None = None
) -> Route:
    """Return the way through a block. `moves` says for each slot of the method's results the one that holds it behind this block."""
    last = block.instructions[-1] if block.instructions else None
    moves = {slot: slot for slot in block.results} if moves is None else moves
    cases = frozenset(entered(block))
    if not isinstance(last, Branch) or not entered(last.then):
        first, final = map(prepared, split_results(replace(block, results=tuple(moves.values()))))
        return Route(first, _with_moves(final, moves), cases=cases)
    asks = prepared(Block(block.instructions[:-1], (), block.sizes))
    ways = []
    for branch in (last.otherwise, last.then):
        inner = dict(zip(last.outputs, branch.results, strict=True))
        ways.append(find_route(branch, prepared, {slot: inner.get(at, at) for slot, at in moves.items()}))
    return Route(asks, Code((), ()), last.condition, tuple(ways), cases)


def entered(block: Block) -> list[str]:
    """Return the cases that a block enters, in order."""
    return [i.attrs["case"] for i in block.walk() if isinstance(i, Run) and i.op == ENTER]


def _with_moves(code: Code, moves: Mapping[int, int]) -> Code:
    """Code that puts the results where the method has them at the end."""
    pairs = [(slot, at) for slot, at in moves.items() if slot != at]
    if not pairs:
        return code

    def move(frame: Frame) -> None:
        for slot, at in pairs:
            frame[slot] = frame[at]

    step: Step = move
    return Code((*code.steps, step), (*code.instructions, None), code.method)
