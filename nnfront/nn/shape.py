# SPDX-License-Identifier: Apache-2.0
"""What an author gives as the shape of a parameter, an argument or a placeholder, read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnfront.dims import Dim, Size, to_size
from nnfront.errors import DimError, SpecError


def shape_of(shape: Any, owner: str) -> tuple[Size, ...]:
    """Return the sizes of a shape: a list or tuple of ints, dim names, dim expressions or Dims.

    `owner` is what the shape is of, for messages. Raises SpecError for what is no list, DimError for an entry that is no size.
    """
    if isinstance(shape, (str, int, Dim)):
        got = f"the text {shape!r}" if isinstance(shape, str) else shape
        raise SpecError(
            f"{owner}: the shape is {got}, not a list",
            help=f"write [{str(shape) if isinstance(shape, Dim) else shape!r}] for one axis",
        )
    if not isinstance(shape, Sequence):
        raise SpecError(
            f"{owner}: the shape is a {type(shape).__module__}.{type(shape).__qualname__}, not a list",
            help="give a list with a size for each axis, as in ['batch', 4]; values come with the weights",
        )
    return tuple([_size(size, i, owner) for i, size in enumerate(shape)])


def _size(size: Any, axis: int, owner: str) -> Size:
    try:
        return to_size(size)
    except DimError as error:
        is_open = size is None or size == -1
        help = "name a size that calls may choose, as in 'batch'" if is_open else error.help
        raise DimError(f"{owner}: axis {axis}: {error.what}", details=error.details, help=help) from None
