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
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise SpecError(f"{owner}: the shape is {_shown(shape)}, not a list", help=_help(shape))
    return tuple([_size(size, i, owner) for i, size in enumerate(shape)])


def _size(size: Any, axis: int, owner: str) -> Size:
    try:
        return to_size(size)
    except DimError as error:
        is_open = size is None or size == -1
        help = "name a size that calls may choose, as in 'batch'" if is_open else error.help
        raise DimError(f"{owner}: axis {axis}: {error.what}", details=error.details, help=help) from None


def _shown(shape: Any) -> str:
    if isinstance(shape, str):
        return f"the text {shape!r}"
    module = f"{type(shape).__module__}.".removeprefix("builtins.")
    return (
        str(shape) if isinstance(shape, (int, Dim, type(None))) else f"a {module}{type(shape).__qualname__}"
    )


def _help(shape: Any) -> str:
    """Say how to write what was meant: one axis, if what stands there is a size."""
    try:
        to_size(shape)
    except DimError:
        return "give a list with a size for each axis, as in ['batch', 4]; values come with the weights"
    return f"write [{str(shape) if isinstance(shape, Dim) else shape!r}] for one axis"
