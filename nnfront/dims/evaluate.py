# SPDX-License-Identifier: Apache-2.0
"""Numbers for sizes: once (`evaluate`), or compiled for use on every call (`evaluator`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nnfront.dims.dim import Dim, Size, form_of
from nnfront.dims.polynomial import constant, single_symbol
from nnfront.dims.sizes import to_text
from nnfront.dims.substitution import rebuild
from nnfront.dims.symbol import Symbol
from nnfront.errors import DimError


def evaluate(a: Size, values: Mapping[Symbol | str, int] | Mapping[Symbol, int] | Mapping[str, int]) -> int:
    """The value of a size, given a number for each of its symbols (keyed by symbol or by name).

    Raises DimError for a symbol without a value and for a division by zero. Facts are not checked.
    """
    if not isinstance(a, Dim):
        return a
    lookup: Mapping[Any, int] = values
    plain = single_symbol(form_of(a))
    if plain in lookup:
        return lookup[plain]
    known = {symbol: lookup[key] for symbol in a.symbols for key in (symbol.name, symbol) if key in lookup}
    _require(a, known)
    terms, number = rebuild(form_of(a), {symbol: constant(value) for symbol, value in known.items()})
    assert not terms
    return number


def evaluator(sizes: Sequence[Size], symbols: Sequence[Symbol]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Compile sizes into one fast function from the symbols' values, in the order given, to the sizes' values.

    Raises DimError if a size needs a symbol that is not listed; the function raises DimError when a divisor is 0.
    """
    for size in sizes:
        if isinstance(size, Dim):
            _require(size, symbols)
    # Symbols become v0, v1, ...: a dim's name may be a Python keyword, and is never given to the compiler.
    variables = {symbol: f"v{i}" for i, symbol in enumerate(symbols)}
    # The text of a size is Python's.
    results = "".join(f"{to_text(size, variables)}, " for size in sizes)
    unpack = "".join(f"{variable}, " for variable in variables.values())
    lines = [
        "def run(values):",
        f" ({unpack}) = values",
        " try:",
        f"  return ({results})",
        " except ZeroDivisionError:",
        "  raise failure(values) from None",
    ]

    def failure(values: Sequence[int]) -> DimError:
        given = (f"{symbol} is {value}" for symbol, value in zip(symbols, values, strict=True))
        shown = ", ".join(str(size) for size in sizes if isinstance(size, Dim))
        return DimError("a dim is divided by zero", details=[*given, f"while computing {shown}"])

    scope: dict[str, Any] = {
        "__builtins__": {"min": min, "max": max, "ZeroDivisionError": ZeroDivisionError},
        "ceildiv": lambda a, b: -(-a // b),
        "failure": failure,
    }
    exec("\n".join(lines), scope)
    run: Callable[[Sequence[int]], tuple[int, ...]] = scope["run"]
    return run


def _require(size: Dim, known: Iterable[Symbol]) -> None:
    given = list(known)
    missing = [symbol.name for symbol in size.symbols if symbol not in given]
    if missing:
        raise DimError(
            f"'{size}' needs a value for {', '.join(missing)}",
            details=["values are given for " + (", ".join(symbol.name for symbol in given) or "no dim")],
        )
