# SPDX-License-Identifier: Apache-2.0
"""The step of a `Match`: check a value's sizes while a method runs, and bind the dims that it defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nnfront.dims import Dim
from nnfront.lower import Argument, DimBinding, Match, Structure, places
from nnfront.runtime.bind_arguments import Known, observed, resolve


def match_step(match: Match, name: str) -> Callable[[list[Any]], None]:
    """Return the step. It raises RunError that names the value, the axis and the dim."""
    argument = Argument(name, match.type, "input", Structure(match.input))
    wanted = dict(match.defines)
    bindings = []
    for place, size in places(match.type, name):
        if (
            isinstance(size, Dim)
            and len(size.symbols) == 1
            and size.symbols[0] in wanted
            and str(size) == size.symbols[0].name
        ):
            symbol = size.symbols[0]
            bindings.append(DimBinding(symbol, wanted.pop(symbol), place, size))

    def step(frame: list[Any]) -> None:
        known: Known = {symbol: (frame[slot], f"dim '{symbol}'") for symbol, slot in match.knows}
        found = resolve(
            lambda place: f"match_shape: {place}",
            list(observed(argument, frame[match.input])),
            bindings,
            known,
        )
        for binding in bindings:
            frame[binding.slot] = found[binding.symbol][0]
        for i in match.frees:
            frame[i] = None

    return step
