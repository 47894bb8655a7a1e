# SPDX-License-Identifier: Apache-2.0
"""Names, numbers, strings and constant data as text, and back. What is written here is read back exactly."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections.abc import Sequence

from nnfront import dtypes

# Words with a meaning of their own where a name may stand; a name that is one of them is written in quotes.
KEYWORDS = frozenset({"if", "return", "yield", "True", "False", "None", "nan", "inf"})
# Those, and words that look like a call.
CALLS = KEYWORDS | {"const", "dim", "match_shape"}
NAME = r"[^\W\d]\w*(?:\.\w+)*"
_is_word = re.compile(NAME).fullmatch

# Constants of up to this many elements are written as lists.
_MAX_LISTED = 16

# dtype -> struct format of one element; bfloat16 is the upper half of a float32, float8 is written as bytes.
_FORMATS = {
    "bool": "B",
    "uint8": "B",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "float16": "e",
    "bfloat16": "f",
    "float32": "f",
    "float64": "d",
}


def name_text(name: str, keywords: frozenset[str] = KEYWORDS) -> str:
    """Return a name as it is if it is a word (dots and digits allowed) and no keyword, else in quotes."""
    return name if _is_word(name) and name not in keywords else quote(name)


def quote(text: str) -> str:
    """Return a string in double quotes with JSON's escapes; what does not print is escaped."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def escape(text: str) -> str:
    """Return a text for a comment: what does not print is escaped."""
    return text if text.isprintable() else quote(text)[1:-1]


def unquote(text: str) -> str:
    """Return the string that `quote` wrote. Raises ValueError for a bad escape."""
    if "\\" not in text:
        return text[1:-1]  # a constant of many MB is not copied through a decoder
    value: str = json.loads(text)
    return value


def number_text(value: bool | int | float) -> str:
    """Return a literal that reads back as the same value of the same class."""
    return repr(value)  # Python's repr of a float is exact, and tells 1.0 from 1, -0.0 from 0.0


def constant_text(data: bytes, dtype: str) -> str:
    """Return elements as a list if there are few and the list is exact, else the bytes in base64, quoted."""
    values = _values(data, dtype)
    if values is not None:
        texts = [_element_text(value, dtype) for value in values]
        if constant_bytes([_read(text) for text in texts], dtype) == data:
            return f"[{', '.join(texts)}]"
    return f'"{base64.b64encode(data).decode()}"'


def constant_bytes(values: Sequence[bool | int | float], dtype: str) -> bytes | None:
    """Return the little-endian bytes of a list of elements, floats rounded to the nearest.

    None if an element does not fit the dtype, or the dtype is float8, whose elements are not listed.
    """
    code = _FORMATS.get(dtype)
    if code is None or not all(_fits(value, dtype) for value in values):
        return None
    try:
        data = struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError):
        return None
    return _upper_halves(data) if dtype == "bfloat16" else data


def _upper_halves(data: bytes) -> bytes:
    """Round float32 to bfloat16: to the nearest, ties to even."""
    words = struct.unpack(f"<{len(data) // 4}I", data)
    # Rounding must not turn a NaN, whose exponent is all ones, into an infinity.
    rounded = [w if w & 0x7FFFFFFF > 0x7F800000 else w + 0x7FFF + (w >> 16 & 1) for w in words]
    return struct.pack(f"<{len(words)}H", *(w >> 16 for w in rounded))


def decode_base64(text: str) -> bytes | None:
    """Return the bytes, None if it is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _fits(value: bool | int | float, dtype: str) -> bool:
    category = dtypes.category(dtype)
    if isinstance(value, bool) or category is dtypes.Category.BOOL:
        return isinstance(value, bool) and category is dtypes.Category.BOOL
    return isinstance(value, int) or category is dtypes.Category.FLOAT


def _values(data: bytes, dtype: str) -> tuple[bool | int | float, ...] | None:
    """Elements of a short constant, None for a long one, for float8, and for bytes that are no whole number of elements."""
    code = _FORMATS.get(dtype)
    if (
        code is None
        or len(data) % dtypes.size_bytes(dtype)
        or len(data) > _MAX_LISTED * dtypes.size_bytes(dtype)
    ):
        return None
    if dtype == "bfloat16":
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    values = struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
    return tuple(bool(value) for value in values) if dtype == "bool" else values


def _element_text(value: bool | int | float, dtype: str) -> str:
    """The shortest decimal that is exact in the dtype."""
    if not isinstance(value, float) or not math.isfinite(value) or dtype == "float64":
        return number_text(value)
    exact = constant_bytes([value], dtype)
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if constant_bytes([short], dtype) == exact:
            return number_text(short)
    return number_text(value)


def _read(text: str) -> bool | int | float:
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text)
    except ValueError:
        return float(text)
