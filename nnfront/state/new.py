# SPDX-License-Identifier: Apache-2.0
"""Make a cache for a program: of the sizes that are given, or of as much as fits; and say what does when there is too little memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal, TypeAlias

from nnfront.backends.registry import device_of
from nnfront.errors import RunError
from nnfront.ir.summary import bytes_text
from nnfront.lower import Program, StateType
from nnfront.memory.free_memory import free_memory_on, is_out_of_memory
from nnfront.state.cache import Cache
from nnfront.state.contiguous import make_cache
from nnfront.state.fit import Fit
from nnfront.state.quantize import is_quantized
from nnfront.state.type import cache_sizes

# A number, or as much as fits.
Amount: TypeAlias = int | Literal["fit"]


def new_cache(
    program: Program,
    type: StateType,
    given: Mapping[str, Amount],
    known: Mapping[str, int],
    *,
    pages: Amount | None = None,
    page_size: int | None = None,
    calls: Mapping[str, int] | None = None,
    stored_as: str | None = None,
) -> Cache:
    """Make an empty cache. `given` are its dims but for those that the weights have bound, which are `known`.

    One of them, or `pages`, may be "fit". Raises RunError as `Session.make_cache` does.
    """
    wanted = [name for name, amount in given.items() if amount == "fit"] + ["pages"] * (pages == "fit")
    if len(wanted) > 1:
        raise RunError(f"make_cache: {' and '.join(map(repr, wanted))} are both 'fit', only one can be")
    device, coded = device_of(program.target), is_quantized(stored_as)
    fitting = partial(Fit, program, type, page_size=page_size or 0, calls=calls, coded=coded)
    if page_size is None and pages == "fit":
        pages = 1  # which is refused without a page size, in words
    if wanted and (page_size is not None or pages is None):
        free = free_memory_on(device)
        if free is None:
            raise RunError(
                "make_cache: nothing says how much memory is free here", help="give all sizes as numbers"
            )
        fit = fitting(free)
        sizes, count = _fitted(fit, wanted[0], given, known, pages)
    else:
        sizes = cache_sizes(type, given, known)
        count = pages if isinstance(pages, int) else None
    try:
        return make_cache(type, sizes, program.target, pages=count, page_size=page_size, stored_as=stored_as)
    except Exception as error:
        room = free_memory_on(device) if is_out_of_memory(error) else None
        if room is None:
            raise
        fit = fitting(room)
        asked = {name: sizes[name] for name in fit.dims} | ({} if count is None else {"pages": count})
        raise RunError(
            f"there is no room for a cache of {bytes_text(fit.cache_bytes(sizes, count))}",
            details=[", ".join(f"{name}={number}" for name, number in asked.items()), *fit.lines(sizes)],
            help="ask for less, or for what fits: make_cache(..., pages='fit'), or max_seq='fit'",
        ) from error


def _fitted(
    fit: Fit, name: str, given: Mapping[str, Amount], known: Mapping[str, int], pages: Amount | None
) -> tuple[dict[str, int], int | None]:
    """All sizes, and the number of pages, with the one of this name as large as fits. Raises RunError if nothing does."""
    lowest = {n: fit.dims[n].min for n, amount in given.items() if amount == "fit" and n in fit.dims}
    sizes = cache_sizes(fit.type, {**given, **lowest}, known)
    if name == "pages":
        found = fit.most_pages(sizes)
    else:
        found = sizes[name] = fit.most(name, sizes)
    if found:
        return sizes, found if name == "pages" else pages if isinstance(pages, int) else None
    sizes |= lowest
    raise RunError(
        f"make_cache: not even the smallest {name!r} fits",
        details=[
            str(fit.room),
            f"calls with the cache take up to {bytes_text(fit.call_bytes(sizes))} of that",
        ],
        help="say what calls there will be, so that less is left free for them: make_cache(..., calls={'seq': 512})",
    )
