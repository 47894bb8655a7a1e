# SPDX-License-Identifier: Apache-2.0
"""Functions over sizes, where a size is an int or a Dim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from numbers import Integral

from nnfront.dims import compare, divide
from nnfront.dims.dim import Dim, Size, form_of, of_symbol, size_of
from nnfront.dims.min_max import extreme
from nnfront.dims.parse import parse_form
from nnfront.dims.polynomial import ONE, ZERO, Form, add, multiply, of_atom, scale, single_symbol, symbols
from nnfront.dims.substitution import rebuild
from nnfront.dims.symbol import Symbol, join_facts
from nnfront.dims.text import text as text_of
from nnfront.errors import DimError


@lru_cache(maxsize=4096)
def parse(text: str) -> Size:
    """The size a text says; names carry no facts. Raises DimError, with a caret under the place that cannot be read."""
    return size_of(parse_form(text))


def to_size(x: object) -> Size:
    """The size that a spec or a shape entry means: an int, a Dim, a text, or a `torch.export.Dim` (its name and range).

    Raises DimError for anything else, and for negative ints.
    """
    if isinstance(x, str):
        size = parse(x)
    elif isinstance(x, Dim):
        size = x
    elif isinstance(x, bool) or not isinstance(x, Integral):
        size = _from_named_range(x)
    else:
        size = int(x)
    if isinstance(size, int) and size < 0:
        raise DimError(f"a size is never negative, got {x!r}")
    return size


def _from_named_range(x: object) -> Size:
    # A derived torch.export.Dim, like 2*batch, keeps the range with its root.
    root = getattr(x, "root", x)
    text = getattr(x, "__name__", None)
    name = getattr(root, "__name__", None)
    low = getattr(root, "min", None)
    if not isinstance(text, str) or not isinstance(name, str) or not isinstance(low, Integral):
        raise DimError(
            f"{x!r} is not a size",
            details=[f"got {type(x).__name__}, expected an int, a name, an expression or a Dim"],
        )
    high = getattr(root, "max", None)
    facts = Symbol(name, 0, int(low), int(high) if isinstance(high, Integral) else None)
    return with_facts(parse(text), {facts: facts})


def symbol(name: str, *, min: int = 0, max: int | None = None, multiple_of: int = 1) -> Dim:
    """The dim with this name; unlike `Dim`, the text must be a name."""
    return of_symbol(Symbol(name, 0, min, max, multiple_of))


def as_symbol(a: Size) -> Symbol | None:
    """The symbol, if a is nothing but one."""
    return single_symbol(a._form) if type(a) is Dim else None


def to_text(a: Size, names: Mapping[Symbol, str] | None = None) -> str:
    """Canonical text, with symbols called as `names` (from `dims.names`) says."""
    return str(a) if isinstance(a, int) or not names else text_of(form_of(a), names)


def minimum(*sizes: Size) -> Size:
    """The least of the sizes (at least one)."""
    return size_of(extreme("min", [form_of(size) for size in sizes]))


def maximum(*sizes: Size) -> Size:
    """The greatest of the sizes (at least one)."""
    return size_of(extreme("max", [form_of(size) for size in sizes]))


def floordiv(a: Size, b: Size) -> Size:
    """`a // b`, rounded towards minus infinity. Raises DimError if b is certainly 0."""
    return size_of(divide.floordiv(form_of(a), form_of(b)))


def ceildiv(a: Size, b: Size) -> Size:
    """`a / b`, rounded towards plus infinity. Raises DimError if b is certainly 0."""
    return size_of(divide.ceildiv(form_of(a), form_of(b)))


def mod(a: Size, b: Size) -> Size:
    """`a % b`, with the sign of b. Raises DimError if b is certainly 0."""
    return size_of(divide.mod(form_of(a), form_of(b)))


def product(sizes: Iterable[Size]) -> Size:
    """The product of the sizes; 1 for none."""
    number, result = 1, ONE
    for size in sizes:
        if isinstance(size, int):
            number *= size
        else:
            result = multiply(result, form_of(size))
    return number if result is ONE else size_of(scale(result, number))


def total(sizes: Iterable[Size]) -> Size:
    """The sum of the sizes; 0 for none."""
    number, result = 0, ZERO
    for size in sizes:
        if isinstance(size, int):
            number += size
        else:
            result = add(result, form_of(size))
    return number if result is ZERO else size_of(add(result, form_of(number)))


def same(a: Size, b: Size) -> bool:
    """Whether both have the same canonical form: the fast answer, never an error, not affected by strict comparisons.

    False may still mean equal for every value; `equal` looks further.
    """
    if a is b:
        return True
    if type(a) is Dim:
        return type(b) is Dim and a._form == b._form
    return type(b) is not Dim and a == b


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether both have the same length and `same` sizes at each axis."""
    return len(a) == len(b) and all(map(same, a, b))


def equal(a: Size, b: Size) -> bool | None:
    """Whether a == b: yes or no for every value inside the facts, or None for unknown."""
    return True if same(a, b) else compare.equal(*_agreed(a, b))


def less_equal(a: Size, b: Size) -> bool | None:
    """Whether a <= b: yes or no for every value inside the facts, or None for unknown."""
    return compare.less_equal(*_agreed(a, b))


def less(a: Size, b: Size) -> bool | None:
    """Whether a < b: yes or no for every value inside the facts, or None for unknown."""
    first, second = _agreed(a, b)
    return compare.less_equal(add(first, ONE), second)


def divides(k: int, a: Size) -> bool | None:
    """Whether k divides a: yes or no for every value inside the facts, or None for unknown. Raises DimError if k is 0."""
    return compare.divides(k, form_of(a))


def satisfies(a: Size, symbol: Symbol) -> bool | None:
    """Whether a lies in the range of the symbol and is a multiple of its `multiple_of`: yes, no, or None for unknown."""
    form = form_of(a)
    answers = [compare.less_equal(((), symbol.min), form), compare.divides(symbol.multiple_of, form)]
    if symbol.max is not None:
        answers.append(compare.less_equal(form, ((), symbol.max)))
    if False in answers:
        return False
    return None if None in answers else True


def substitute(a: Size, mapping: Mapping[Symbol, Size]) -> Size:
    """Replace symbols by sizes, all at once. Returns the same object if nothing changes."""
    if type(a) is not Dim:
        return a
    plain = single_symbol(a._form)
    if plain is not None:
        return mapping.get(plain, a)
    found = {symbol: mapping[symbol] for symbol in a.symbols if symbol in mapping}
    values = {symbol: form_of(size) for symbol, size in found.items() if not is_itself(symbol, size)}
    form = rebuild(a._form, values)
    return a if form is a._form else size_of(form)


def is_itself(symbol: Symbol, a: Size) -> bool:
    """Whether a size is nothing but a symbol, with all that is known of that and no more."""
    own = as_symbol(a)
    return own == symbol and own is not None and own.facts == symbol.facts


def with_facts(a: Size, facts: Mapping[Symbol, Symbol]) -> Size:
    """Bring a to canonical form under what `facts` (from `merge_facts`) says about its symbols."""
    if type(a) is not Dim:
        return a
    return substitute(a, {symbol: of_symbol(facts[symbol]) for symbol in a.symbols if symbol in facts})


def _agreed(a: Size, b: Size) -> tuple[Form, Form]:
    """Both forms, with the facts of both about each symbol, so that what one side knows helps the other."""
    first, second = form_of(a), form_of(b)
    known = {symbol: symbol for symbol in symbols(first)}
    both = [(known[symbol], symbol) for symbol in symbols(second) if symbol in known]
    joined = [join_facts(one, other) for one, other in both if one.facts != other.facts]
    values = {symbol: of_atom(symbol) for symbol in joined if symbol is not None}
    return (rebuild(first, values), rebuild(second, values)) if values else (first, second)
