# SPDX-License-Identifier: Apache-2.0
"""Lists and dicts of modules or parameters as modules. Plain Python lists and dicts work as well."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Generic, TypeVar

from nnfront.errors import TraceError
from nnfront.nn.mode import names_place
from nnfront.nn.module import Container, Module
from nnfront.nn.parameter import Parameter

Item = TypeVar("Item")


class _ListOf(Container, Generic[Item]):
    """A list; what it holds is named by index."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self.items_: list[Item] = list(items)

    def __getitem__(self, index: Any) -> Any:
        found = self.items_[index]
        return type(self)(found) if isinstance(index, slice) else found

    def __setitem__(self, index: int, item: Item) -> None:
        self.items_[index] = item

    def __len__(self) -> int:
        return len(self.items_)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items_)

    def append(self, item: Item) -> None:
        """Add one at the end."""
        self.items_.append(item)

    def extend(self, items: Iterable[Item]) -> None:
        """Add several at the end."""
        self.items_.extend(items)

    def insert(self, index: int, item: Item) -> None:
        """Add one before `index`."""
        self.items_.insert(index, item)


class _DictOf(Container, Generic[Item]):
    """A dict; what it holds is named by key. Iterates over keys."""

    def __init__(self, items: Mapping[str, Item] | None = None) -> None:
        self.items_: dict[str, Item] = dict(items or {})

    def __getitem__(self, key: str) -> Item:
        return self.items_[key]

    def __setitem__(self, key: str, item: Item) -> None:
        self.items_[key] = item

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __contains__(self, key: object) -> bool:
        return key in self.items_

    def __len__(self) -> int:
        return len(self.items_)

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def keys(self) -> KeysView[str]:
        """Return the keys."""
        return self.items_.keys()

    def values(self) -> ValuesView[Item]:
        """Return the items."""
        return self.items_.values()

    def items(self) -> ItemsView[str, Item]:
        """Return pairs of key and item."""
        return self.items_.items()

    def get(self, key: str, default: Item | None = None) -> Item | None:
        """Return the item under `key`, or `default`."""
        return self.items_.get(key, default)

    def pop(self, key: str) -> Item:
        """Remove the item under `key` and return it."""
        return self.items_.pop(key)

    def update(self, items: Mapping[str, Item]) -> None:
        """Add or replace several."""
        self.items_.update(items)


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
