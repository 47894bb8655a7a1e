# SPDX-License-Identifier: Apache-2.0
"""`Session`: methods with their weights, ready to be called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from nnfront.dims import Symbol
from nnfront.errors import RunError
from nnfront.lower import CacheType, Program
from nnfront.runtime import Cache, Method
from nnfront.runtime.cache import cache_sizes, describe, layout, make_cache
from nnfront.runtime.loading import Values, learn_dims
from nnfront.runtime.signature import Known
from nnfront.weights import BoundWeights


class Session(Mapping[str, Method]):
    """The methods of a program by name, over one set of weights that nobody changes."""

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Any],
        transformed: Mapping[str, Mapping[str, Any]] | None = None,
        dims: Mapping[Symbol, int] | None = None,
        *,
        sources: BoundWeights | None = None,
    ) -> None:
        """`weights` are the raw ones by name, `transformed` the results of each transform by its name and theirs.

        `dims` are sizes that weights have said which are not among these; `sources` is the checkpoint that all this was made of,
        where there is one. Raises LoadError for weights that do not fit.
        """
        self.program = program
        self.sources = sources
        results = transformed or {}
        values: dict[str, Values] = {
            name: {"weight": weights, "transformed": results.get(method.transform or "", {})}
            for name, method in program.methods.items()
        }
        self._known: Known = {symbol: (number, "the weights") for symbol, number in (dims or {}).items()}
        for name, method in program.methods.items():
            learn_dims(self._known, method, values[name])
        self._methods = {name: Method(m, values[name], self._known) for name, m in program.methods.items()}
        prefixed = len(results) > 1
        named = {f"{t}.{n}" if prefixed else n: v for t, found in results.items() for n, v in found.items()}
        self.weights: Mapping[str, Any] = MappingProxyType({**weights, **named})

    def __getitem__(self, name: str) -> Method:
        method = self._methods.get(name)
        if method is None:
            raise RunError(
                f"there is no method {name!r}",
                help=f"methods are {', '.join(map(repr, self._methods)) or 'none'}",
            )
        return method

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods."""
        return tuple(self._methods)

    def make_cache(self, **sizes: int) -> Cache:
        """Make an empty cache for the methods of this session; `sizes` are its dims by name: `make_cache(batch=1, max_seq=4096)`.

        Raises RunError for a dim that is missing, unknown or outside its range, and if no method takes a cache.
        """
        types = {
            a.type: None
            for m in self.program.methods.values()
            for a in m.arguments
            if isinstance(a.type, CacheType)
        }
        if not types:
            raise RunError("no method takes a cache")
        if len({layout(type) for type in types}) > 1:
            raise RunError(
                "the methods take different caches", details=[describe(layout(type)) for type in types]
            )
        type = next(iter(types))
        known = {symbol.name: number for symbol, (number, _) in self._known.items()}
        return make_cache(type, cache_sizes(type, sizes, known))
