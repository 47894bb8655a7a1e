# SPDX-License-Identifier: Apache-2.0
"""What is said about a cache before there is one: whether it fits a method, and how large its dims are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from nnfront.dims import Dim, describe_facts, satisfies
from nnfront.errors import RunError
from nnfront.lower import Buffer, StateLayerType, StateType

# Of each layer the buffers that it keeps of tokens and of sequences, and the window.
Layout: TypeAlias = tuple[tuple[tuple[Buffer, ...], tuple[Buffer, ...], int | None], ...]


def layout(type: StateType) -> Layout:
    """What a cache must have in common with another to be used in its place: all but for how many sequences and tokens it is."""
    return _interned(tuple(layer.kind for layer in type.layers))


@lru_cache(maxsize=1024)
def _interned(value: Layout) -> Layout:
    return value


def describe(value: Layout) -> str:
    """A layout in words."""
    parts = []
    for kind, count in Counter(value).items():
        per_token, per_sequence, window = kind
        seen = "" if window is None else f", window {window}"
        parts.append(f"{count} layers of {StateLayerType(per_token, per_sequence, 0, 0)}{seen}")
    return "; ".join(parts) or "no layers"


def cache_sizes(cache: StateType, given: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, int]:
    """Check the dims of a cache: all that the weights do not bind, each inside its range."""
    symbols = {
        s.name: s
        for layer in cache.layers
        for size in (layer.batch, layer.max_seq)
        if isinstance(size, Dim)
        for s in size.symbols
    }
    needed = [name for name in symbols if name not in known]
    missing = [name for name in needed if name not in given]
    help = f"make_cache({', '.join(f'{n}=...' for n in needed)})"
    if missing:
        raise RunError(f"make_cache needs {', '.join(repr(n) for n in missing)}", help=help)
    for name, number in given.items():
        if name not in needed:
            raise RunError(f"make_cache: {name!r} is not a dim of the cache", help=help)
        if type(number) is not int or satisfies(number, symbols[name]) is False:
            raise RunError(
                f"make_cache: {name!r} is {number!r}, expected {describe_facts(*symbols[name].facts)}"
            )
    return {**known, **given}
