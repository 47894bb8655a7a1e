# SPDX-License-Identifier: Apache-2.0
"""The check of a call against its signature, said in full: what an argument must be, what it is, and what its sizes mean.

This is the slow and complete form: it converts what may be converted and says precisely what is wrong. `check.py` compiles the
short form that accepts a right call in microseconds and leaves everything else to this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from nnfront.dims import Dim, Size, Symbol, describe_facts, evaluate, satisfies, solve, substitute
from nnfront.errors import DimError, RunError, nearest
from nnfront.lower import Argument, DimBinding, Match, MethodProgram, Place, Structure, places
from nnfront.runtime.argument_types import call_error, convert, count_of

Known = dict[Symbol, tuple[int, str]]
"""Each dim's number, and the place that said it."""
Found: TypeAlias = tuple[Place, Size, int]
"""A place, the size that the signature has there, and the number that was found."""
Title: TypeAlias = Callable[[Place], str]


def arrange(program: MethodProgram, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call in the order of the signature. Raises RunError if they are too many, too few or unknown."""
    names = [a.name for a in program.arguments]
    if len(args) > len(names):
        raise call_error(program, f"takes {count_of(len(names), 'argument')}, got {len(args)}")
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise call_error(program, f"{name!r} is not an argument", help=nearest(name, names))
        if name in given:
            raise call_error(program, f"argument {name!r} is given twice, by position and by name")
        given[name] = value
    missing = [repr(name) for name in names if name not in given]
    if missing:
        words = f"argument {missing[0]} is" if len(missing) == 1 else f"arguments {', '.join(missing)} are"
        raise call_error(program, f"{words} missing")
    return [given[name] for name in names]


def bind(
    program: MethodProgram, args: Sequence[Any], known: Known, left: Sequence[Found] = ()
) -> tuple[list[Any], dict[Symbol, int]]:
    """Return the arguments, converted, and the number of every dim. `known` are the dims that the weights have bound, `left` their
    sizes over dims that the arguments bind.

    Raises RunError that says the argument, the axis, the dim and what else has said it.
    """
    values = [convert(program, repr(a.name), a.type, v) for a, v in zip(program.arguments, args, strict=True)]
    found = [item for a, v in zip(program.arguments, values, strict=True) for item in observed(a, v)]
    unknown = [b for b in program.dims if b.symbol not in known]
    sizes = resolve(titles(program), [*found, *left], unknown, dict(known))
    return values, {symbol: number for symbol, (number, _) in sizes.items()}


def titles(program: MethodProgram) -> Title:
    """Return how an error about a method begins that is about a place."""
    return lambda place: f"{program.name}: {'weight' if place.is_weight else 'argument'} {place}"


def observed(argument: Argument, value: Any) -> Iterator[Found]:
    """Yield every size in an argument's type with the number that a value has there."""
    is_weight = argument.role in ("weight", "transformed")
    for place, size in places(argument.type, argument.name, is_weight=is_weight):
        part = value
        for index in place.path:
            part = part[index]
        match place.axis:
            case "value":
                yield place, size, int(part)
            case "batch":
                yield place, size, part.batch
            case "max_seq":
                yield place, size, part.max_seq
            case axis:
                yield place, size, (part.shape if isinstance(part, torch.Tensor) else part)[axis]


def resolve(title: Title, found: Sequence[Found], bindings: Sequence[DimBinding], known: Known) -> Known:
    """Bind each dim once and check every size; a message begins with the title of a place. Raises RunError."""
    direct = {b.place for b in bindings if not b.is_solved}
    numbers: dict[Place, int] = {}
    for place, size, number in found:
        numbers[place] = number
        if isinstance(size, int):
            if size != number:
                raise RunError(f"{title(place)} is {number}, expected {size}")
        elif place in direct:
            (symbol,) = size.symbols
            _check_facts(title(place), size, number, symbol)
            known[symbol] = number, str(place)
    for binding in bindings:
        if binding.is_solved:
            _solve(title, binding, numbers[binding.place], known)
    for place, size, number in found:
        if isinstance(size, Dim) and place not in direct:
            _check_size(title(place), size, number, known)
    return known


def _check_facts(what: str, size: Dim, number: int, symbol: Symbol) -> None:
    if satisfies(number, symbol) is False:
        low, high, step = symbol.facts
        if high is not None and number > high:
            words = f"at most {high}"
        elif number < low:
            words = f"at least {low}"
        else:
            words = f"a multiple of {step}"
        raise RunError(f"{what} is '{size}' = {number}, but '{symbol}' is {words}")


def _solve(title: Title, binding: DimBinding, number: int, known: Known) -> None:
    place, size, symbol = binding.place, binding.size, binding.symbol
    rest = substitute(size, {s: known[s][0] for s in size.symbols if s in known})
    try:
        known[symbol] = solve([(rest, number)])[symbol], str(place)
    except (DimError, KeyError):
        said = [f"{known[s][1]} said '{s}' = {known[s][0]}" for s in size.symbols if s in known]
        facts = "" if symbol.facts == (0, None, 1) else f", which is {describe_facts(*symbol.facts)},"
        raise RunError(
            f"{title(place)} is '{size}' = {number}, but no '{symbol}'{facts} gives that", details=said
        ) from None


def _check_size(what: str, size: Dim, number: int, known: Known) -> None:
    expected = evaluate(size, {symbol: known[symbol][0] for symbol in size.symbols})
    if expected == number:
        return
    if str(size) == str(size.symbols[0]):
        said = known[size.symbols[0]]
        raise RunError(f"{what} is '{size}' = {number}, but {said[1]} already said '{size}' = {said[0]}")
    said_by = [f"{known[s][1]} said '{s}' = {known[s][0]}" for s in size.symbols]
    raise RunError(f"{what} is {number}, but '{size}' is {expected}", details=said_by)


def match_step(match: Match, name: str) -> Callable[[list[Any]], None]:
    """Return the step of a `Match`: it checks a value's sizes while a method runs, and binds the dims that it defines. It raises RunError that names the value, the axis and the dim."""
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
