# SPDX-License-Identifier: Apache-2.0
"""Formats of `print_`: text with fields `{}`, `{1}` or `{0:>8.3f}`.

A part of what `str.format` reads: a field is a position and a plain specification. Python's own formats reach every attribute of an
operand, and through those all of the process; a format may come with a model from outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nnfront import dtypes
from nnfront.errors import InferError
from nnfront.ir.operands import OperandType
from nnfront.ir.types import TensorType
from nnfront.ops.rules import require

_PIECE = re.compile(
    r"(?P<text>[^{}]+)|(?P<brace>\{\{|\}\})|\{(?P<position>[0-9]{0,4})(?::(?P<spec>[^{}]*))?\}"
)
_SPEC = re.compile(
    r"(?:.?[<>=^])?[-+ ]?#?0?(?P<width>[0-9]{0,4})[,_]?(?:\.(?P<precision>[0-9]{1,4}))?[bdeEfFgGoxX%]?"
)
_WIDEST = 1000  # characters of a field, digits of a number
_SAMPLES = {dtypes.Category.BOOL: True, dtypes.Category.INT: 1, dtypes.Category.FLOAT: 0.5}


class Field(NamedTuple):
    """The place of an operand in a format."""

    position: int
    spec: str


def pieces(format: str) -> Iterator[str | Field]:
    """Yield texts and fields in order. Raises InferError for what is no format of `print_`."""
    end, count, kinds = 0, 0, set[bool]()
    while end < len(format):
        match = _PIECE.match(format, end)
        if match is None:
            raise InferError(
                f"the format {format[:100]!r} cannot be read at {format[end : end + 20]!r}",
                help="a field is {}, {1} or {0:>8.3f}; a brace that is none is written twice",
            )
        end = match.end()
        if match["position"] is None:
            yield match["text"] or match["brace"][0]
            continue
        kinds.add(match["position"] == "")
        require(len(kinds) == 1, "fields of a format have numbers all or none")
        yield Field(int(match["position"] or count), _checked(match["spec"] or ""))
        count += 1


def check(format: str, operands: Sequence[OperandType]) -> None:
    """Raise InferError unless each field names an operand, and with a specification one that is a number of a kind that it can show."""
    for field in pieces(format):
        if isinstance(field, str):
            continue
        require(
            field.position < len(operands),
            "the format names operand {}, there are {}",
            field.position,
            len(operands),
        )
        operand = operands[field.position]
        if not field.spec:
            continue
        require(
            not isinstance(operand, TensorType) or not operand.shape,
            "operand {} has axes, and only a single number is shown as {!r}",
            field.position,
            field.spec,
        )
        try:
            _SAMPLES[dtypes.category(operand.dtype)].__format__(field.spec)
        except ValueError as error:
            raise InferError(f"operand {field.position} is a {operand.dtype}: {error}") from None


def formatted(format: str, values: Sequence[Any]) -> str:
    """Return the text of a format that has been checked."""
    return "".join(
        piece if isinstance(piece, str) else values[piece.position].__format__(piece.spec)
        for piece in pieces(format)
    )


def _checked(spec: str) -> str:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise InferError(
            f"{spec[:50]!r} is no specification of a field that print_ knows", help="one is >8, .3f, 04d or x"
        )
    for what in ("width", "precision"):
        require(int(match[what] or 0) <= _WIDEST, "a {} is at most {}, got {}", what, _WIDEST, match[what])
    return spec
