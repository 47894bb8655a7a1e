# SPDX-License-Identifier: Apache-2.0
"""Write a form as text that parses back: `2*seq + 1`, `ceildiv(seq, 16)`, `min(seq, 4096)`, `batch*(seq // 16)`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nnfront.dims.divide import is_nonnegative
from nnfront.dims.polynomial import Atom, Call, Coefficient, Form, Monomial, divisor, terms_divisor
from nnfront.dims.symbol import Symbol

Names = Mapping[Symbol, str]


def text(form: Form, names: Names) -> str:
    """Canonical text; `names` overrides how symbols are called."""
    terms, offset = form
    parts: list[tuple[bool, str]] = []
    for monomial, value in terms:
        atom = monomial[0][0]
        if value in (1, -1) and monomial == ((atom, 1),) and _is_symbolic_ceildiv(atom):
            written = _symbolic_ceildiv(atom, names)
            offset -= int(value)
        else:
            written = _term(monomial, -value if value < 0 else value, names)
        parts.append((value < 0, written))
    if offset or not parts:
        parts.append((offset < 0, str(abs(offset))))
    # A positive part first, so that the text starts without a minus where it can.
    parts.sort(key=lambda part: part[0])
    negative, first = parts[0]
    if negative:
        first = f"-({first})" if " // " in first or " % " in first else f"-{first}"
    return first + "".join(f" - {part}" if minus else f" + {part}" for minus, part in parts[1:])


def _term(monomial: Monomial, value: Coefficient, names: Names) -> str:
    """Text of a term with a positive coefficient."""
    if value == 1 and len(monomial) == 1 and monomial[0][1] == 1:
        return _atom(monomial[0][0], names)
    factors = [] if value.numerator == 1 else [str(value.numerator)]
    for atom, power in monomial:
        factors += [_factor(atom, names)] * power
    product = "*".join(factors)
    return product if value.denominator == 1 else f"{product} // {value.denominator}"


def _atom(atom: Atom, names: Names) -> str:
    if isinstance(atom, Symbol):
        return names.get(atom, atom.name)
    if atom.kind in ("min", "max"):
        return f"{atom.kind}({', '.join(text(arg, names) for arg in atom.args)})"
    x, y = atom.args
    if _is_ceildiv(atom):
        return f"ceildiv({text((x[0], 0), names)}, {y[1]})"
    return f"{_left_operand(x, names)} {'//' if atom.kind == 'floordiv' else '%'} {_right_operand(y, names)}"


def _factor(atom: Atom, names: Names) -> str:
    written = _atom(atom, names)
    return f"({written})" if _is_infix(atom) else written


def _left_operand(form: Form, names: Names) -> str:
    written = text(form, names)
    if not form[0] and form[1] >= 0:
        return written
    if len(form[0]) == 1 and form[1] == 0:
        ((monomial, value),) = form[0]
        alone = len(monomial) == 1 and monomial[0][1] == 1 and value == 1
        if value.denominator == 1 and value > 0 and not (alone and _is_infix(monomial[0][0])):
            return written
    return f"({written})"


def _right_operand(form: Form, names: Names) -> str:
    if not form[0]:
        return str(form[1])
    (monomial, value), *more = form[0]
    if not more and value == 1 and form[1] == 0 and len(monomial) == 1 and monomial[0][1] == 1:
        return _factor(monomial[0][0], names)
    return f"({text(form, names)})"


def _is_infix(atom: Atom) -> bool:
    return isinstance(atom, Call) and atom.kind in ("floordiv", "mod") and not _is_ceildiv(atom)


def _is_ceildiv(atom: Atom) -> bool:
    """(x + k - 1) // k; where x is a multiple of g, the constant is k - g in canonical form."""
    if not isinstance(atom, Call) or atom.kind != "floordiv":
        return False
    x, y = atom.args
    return not y[0] and x[1] != 0 and x[1] == y[1] - math.gcd(terms_divisor(x[0]), y[1])


def _is_symbolic_ceildiv(atom: Atom) -> bool:
    """(x - 1) // y for a dim y > 0, which is ceildiv(x, y) - 1; where both are multiples of g, the constant is -g."""
    if not isinstance(atom, Call) or atom.kind != "floordiv":
        return False
    x, y = atom.args
    return (
        bool(y[0]) and is_nonnegative(y) and x[1] != 0 and x[1] == -math.gcd(terms_divisor(x[0]), divisor(y))
    )


def _symbolic_ceildiv(atom: Atom, names: Names) -> str:
    assert isinstance(atom, Call)
    x, y = atom.args
    return f"ceildiv({text((x[0], 0), names)}, {text(y, names)})"
