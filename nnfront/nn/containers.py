# SPDX-License-Identifier: Apache-2.0
"""Lists and dicts of modules or parameters as modules. Plain Python lists and dicts work as well."""

from __future__ import annotations

from collections import UserDict, UserList
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from nnfront.errors import TraceError
from nnfront.nn.mode import names_place
from nnfront.nn.module import Container, Module
from nnfront.nn.parameter import Parameter

Item = TypeVar("Item")


class _ListOf(Container, UserList[Item]):
    """A list; what it holds is named by index."""

    # A module is equal to itself alone.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, items: Iterable[Item] = ()) -> None:
        super().__init__(items)


class _DictOf(Container, UserDict[str, Item]):
    """A dict; what it holds is named by key. Iterates over keys."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, items: Mapping[str, Item] | None = None) -> None:
        super().__init__(items or {})


class ModuleList(_ListOf[Any]):
    """A list of modules. Called, it passes its argument through all of them in order."""

    @names_place
    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__(modules)
        for i, module in enumerate(self.data):
            if not isinstance(module, Module):
                raise TraceError(
                    f"{type(self).__name__}: item {i} is a {type(module).__name__}, not a module",
                    help="write a module with this forward; a list of modules is given as *modules to Sequential",
                )

    def forward(self, x: Any) -> Any:
        """Apply the modules one after the other."""
        for module in self.data:
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
