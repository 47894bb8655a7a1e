# SPDX-License-Identifier: Apache-2.0
"""`Dim`, the symbolic size that users and all rooms hold: canonical forms with Python's operators around them."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, NoReturn, TypeAlias

from nnfront.dims import divide
from nnfront.dims.parse import parse_form
from nnfront.dims.polynomial import (
    INF,
    Form,
    add,
    bounds,
    divisor,
    multiply,
    negate,
    of_atom,
    single_symbol,
    sorted_symbols,
    subtract,
)
from nnfront.dims.require_comparison import equality, known_facts, order
from nnfront.dims.symbol import Symbol, names
from nnfront.dims.text import text as text_of
from nnfront.errors import DimError

Operator: TypeAlias = "Callable[[Dim, Size], Size]"


def _comparison(sign: str) -> Callable[[Dim, Size], bool]:
    def compared(self: Dim, other: Size) -> bool:
        form = _operand(other)
        return NotImplemented if form is None else order(sign, self._form, form)

    return compared


def _operator(function: Callable[[Form, Form], Form]) -> tuple[Operator, Operator]:
    """An operator with the dim on its left, and with the dim on its right."""

    def left(self: Dim, other: Size) -> Size:
        form = _operand(other)
        return NotImplemented if form is None else size_of(function(self._form, form))

    def right(self: Dim, other: Size) -> Size:
        form = _operand(other)
        return NotImplemented if form is None else size_of(function(form, self._form))

    return left, right


class Dim:
    """A symbolic integer: a name (`Dim("seq", min=1, max=8192)`) or an expression over names (`Dim("2*seq + 1")`).

    Never a constant: an operation whose result is constant returns an int. Immutable. Arithmetic (+ - * // %) is Python's, with
    ints and Dims on either side. `==` asks whether both have the same canonical form; facts take no part in it. `< <= > >=` answer if
    the facts decide and raise DimError otherwise. A Dim has no value, so bool(), int() and range() of it raise DimError.

    Args: `min`, `max` (inclusive) and `multiple_of` are facts about a *name*; a dim is at least 0.
    Raises DimError for text that cannot be read, a constant, facts about an expression, and facts that contradict each other.
    """

    __slots__ = ("_form", "_hash", "_symbols", "_text")
    _form: Form
    # Found when first asked for.
    _hash: int | None
    _symbols: tuple[Symbol, ...] | None
    _text: str | None

    def __new__(
        cls, text: str, *, min: int | None = None, max: int | None = None, multiple_of: int | None = None
    ) -> Dim:
        if not isinstance(text, str):
            raise DimError(f"a Dim is made from text, got {text!r}", help="an int is a size as it is")
        form = parse_form(text)
        if not form[0]:
            raise DimError(
                f"{text!r} is the constant {form[1]}, not a symbolic dim", help=f"write the int {form[1]}"
            )
        if (min, max, multiple_of) == (None, None, None):
            return _make(form)
        return _of_facts(text, form, min, max, multiple_of)

    @classmethod
    def fresh(
        cls, name: str, *, min: int | None = None, max: int | None = None, multiple_of: int | None = None
    ) -> Dim:
        """A dim of its own: equal only to itself, whatever its name. `names` tells how to print several apart."""
        return of_symbol(Symbol.fresh(name, min or 0, max, 1 if multiple_of is None else multiple_of))

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The symbols that occur, sorted by name."""
        if self._symbols is None:
            self._symbols = sorted_symbols(self._form)
        return self._symbols

    @property
    def min(self) -> int | None:
        """Least value: as declared for a plain name, else what the facts prove (None: no bound)."""
        plain = single_symbol(self._form)
        low = plain.min if plain else bounds(self._form)[0]
        return None if low == -INF else int(low)

    @property
    def max(self) -> int | None:
        """Greatest value: as declared for a plain name, else what the facts prove (None: no bound)."""
        plain = single_symbol(self._form)
        if plain:
            return plain.max
        high = bounds(self._form)[1]
        return None if high == INF else int(high)

    @property
    def multiple_of(self) -> int:
        """A number that is known to divide every value."""
        return divisor(self._form)

    def __str__(self) -> str:
        if self._text is None:
            self._text = text_of(self._form, names(self.symbols))
        return self._text

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __repr__(self) -> str:
        return f"Dim({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self._form,)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self._form)
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            other = size_of(parse_form(other))
        if self is other:
            return True
        form = _operand(other)
        return form is not None and equality(self._form, form)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __lt__ = _comparison("<")
    __le__ = _comparison("<=")
    __gt__ = _comparison(">")
    __ge__ = _comparison(">=")

    def __add__(self, other: Size) -> Size:
        if type(other) is int:
            terms, offset = self._form
            return _make((terms, offset + other))
        form = _operand(other)
        return NotImplemented if form is None else size_of(add(self._form, form))

    __radd__ = __add__

    __sub__, __rsub__ = _operator(subtract)
    __mul__, __rmul__ = _operator(multiply)
    __floordiv__, __rfloordiv__ = _operator(divide.floordiv)
    __mod__, __rmod__ = _operator(divide.mod)

    def __neg__(self) -> Dim:
        return _make(negate(self._form))

    def __pos__(self) -> Dim:
        return self

    def __truediv__(self, other: object) -> NoReturn:
        raise DimError(
            f"dim '{self}' cannot be divided with '/': the result need not be an integer",
            help="use // to round down, or dims.ceildiv to round up",
        )

    __rtruediv__ = __truediv__

    def __pow__(self, other: object) -> NoReturn:
        raise DimError(f"dim '{self}' cannot be raised to a power", help="write the product, n * n")

    __rpow__ = __pow__

    def __bool__(self) -> NoReturn:
        self._no_value("true or false")

    def __index__(self) -> NoReturn:
        self._no_value("a Python int")

    __int__ = __index__

    def __float__(self) -> NoReturn:
        self._no_value("a Python float")

    def _no_value(self, wanted: str) -> NoReturn:
        raise DimError(
            f"dim '{self}' has no value yet, so it cannot be used as {wanted}",
            details=known_facts(self._form),
            help="give the dim as an int if it is the same in every call, or compare it with another size",
        )


Size: TypeAlias = int | Dim


def _make(form: Form) -> Dim:
    dim = object.__new__(Dim)
    dim._form = form
    dim._hash = dim._symbols = dim._text = None
    return dim


def _of_facts(text: str, form: Form, least: int | None, most: int | None, multiple_of: int | None) -> Dim:
    symbol = single_symbol(form)
    if symbol is None:
        raise DimError(
            f"{text!r} is an expression, and facts belong to a name",
            help="say them about a name, as in Dim('seq', min=1), and build the expression from it",
        )
    facts = Symbol(
        symbol.name, 0, 0 if least is None else least, most, 1 if multiple_of is None else multiple_of
    )
    return _make(of_atom(facts))


def of_symbol(symbol: Symbol) -> Dim:
    """The dim that is this symbol."""
    return _make(of_atom(symbol))


def size_of(form: Form) -> Size:
    """The int or Dim that a form is."""
    return _make(form) if form[0] else form[1]


def form_of(size: Size) -> Form:
    """The form of an int or Dim."""
    return size._form if type(size) is Dim else ((), int(size))


def _operand(other: object) -> Form | None:
    if type(other) is Dim:
        return other._form
    if isinstance(other, bool) or not isinstance(other, Integral):
        return None
    return (), int(other)
