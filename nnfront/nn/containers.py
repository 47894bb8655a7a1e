# SPDX-License-Identifier: Apache-2.0
"""Lists and dicts of modules or parameters as modules. Plain Python lists and dicts work as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, TypeVar

from nnfront.errors import TraceError
from nnfront.nn.mode import names_place
from nnfront.nn.module import Container, Module
from nnfront.nn.parameter import Parameter

Item = TypeVar("Item")


class _ListOf(Container, MutableSequence[Item]):
    """A list; what it holds is named by index."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self.items_: list[Item] = list(items)

    def __getitem__(self, index: Any) -> Any:
        found = self.items_[index]
        return type(self)(found) if isinstance(index, slice) else found

    def __setitem__(self, index: Any, item: Any) -> None:
        self.items_[index] = item

    def __delitem__(self, index: Any) -> None:
        del self.items_[index]

    def __len__(self) -> int:
        return len(self.items_)

    def insert(self, index: int, item: Item) -> None:
        """Add one before `index`."""
        self.items_.insert(index, item)


class _DictOf(Container, MutableMapping[str, Item]):
    """A dict; what it holds is named by key. Iterates over keys."""

    # A module is equal to itself alone.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, items: Mapping[str, Item] | None = None) -> None:
        self.items_: dict[str, Item] = dict(items or {})

    def __getitem__(self, key: str) -> Item:
        return self.items_[key]

    def __setitem__(self, key: str, item: Item) -> None:
        self.items_[key] = item

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __len__(self) -> int:
        return len(self.items_)

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)


class ModuleList(_ListOf[Any]):
    """A list of modules. Called, it passes its argument through all of them in order."""

    @names_place
    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__(modules)
        for i, module in enumerate(self.items_):
            if not isinstance(module, Module):
                raise TraceError(
                    f"{type(self).__name__}: item {i} is a {type(module).__name__}, not a module",
                    help="write a module with this forward; a list of modules is given as *modules to Sequential",
                )

    def forward(self, x: Any) -> Any:
        """Apply the modules one after the other."""
        for module in self.items_:
            x = module(x)
        return x


class Sequential(ModuleList):
    """Modules that are applied one after the other."""

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)


class ModuleDict(_DictOf[Any]):
    """A dict of modules."""


class ParameterList(_ListOf[Parameter]):
    """A list of parameters."""


class ParameterDict(_DictOf[Parameter]):
    """A dict of parameters."""
