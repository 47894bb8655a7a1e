# SPDX-License-Identifier: Apache-2.0
"""`Mutator`: rewrite a module tree in place, for example to replace every Linear by a quantised one."""

from __future__ import annotations

from typing import Any

from nnfront.nn.containers import ModuleDict, ModuleList, ParameterDict, ParameterList
from nnfront.nn.module import Container, Module
from nnfront.nn.parameter import Parameter


class Mutator:
    """Override the `visit_*` methods; each gets the attribute path and the node, and returns what takes its place.

    Call `visit(name, node)` on the root. A method that wants the nodes below its own visited calls `super().visit_*`.
    A module or parameter that is reached twice in one visit is visited once and replaced by the same thing in both places.
    """

    def visit(self, name: str, node: Any) -> Any:
        """Visit a module, parameter, list, tuple or dict; anything else is returned as it is."""
        # What was visited is noted on the instance from outside __init__, so that subclasses need not call it.
        outermost = "_visited" not in vars(self)
        done: dict[int, tuple[Any, Any]] = vars(self).setdefault("_visited", {})
        try:
            if id(node) not in done:
                done[id(node)] = (node, self._dispatch(name, node))
            return done[id(node)][1]
        finally:
            if outermost:
                del vars(self)["_visited"]

    def _dispatch(self, name: str, node: Any) -> Any:
        match node:
            case ModuleList():
                return self.visit_modulelist(name, node)
            case ModuleDict():
                return self.visit_moduledict(name, node)
            case ParameterList():
                return self.visit_paramlist(name, node)
            case ParameterDict():
                return self.visit_paramdict(name, node)
            case Module():
                return self.visit_module(name, node)
            case Parameter():
                return self.visit_param(name, node)
            case list() | tuple():
                return type(node)(self.visit(_join(name, str(i)), item) for i, item in enumerate(node))
            case dict():
                return {key: self.visit(_join(name, str(key)), item) for key, item in node.items()}
            case _:
                return node

    def visit_module(self, name: str, node: Module) -> Any:
        """Visit everything a module holds."""
        for key, item in list(vars(node).items()):
            below = node.member_name(key) if isinstance(node, Container) else key
            new = self.visit(_join(name, below), item)
            if isinstance(item, list) and isinstance(new, list):
                item[:] = new
            elif isinstance(item, dict) and isinstance(new, dict):
                item.update(new)
            elif new is not item:
                setattr(node, key, new)
        return node

    def visit_modulelist(self, name: str, node: ModuleList) -> Any:
        """Visit each module of a list."""
        return self.visit_module(name, node)

    def visit_moduledict(self, name: str, node: ModuleDict) -> Any:
        """Visit each module of a dict."""
        return self.visit_module(name, node)

    def visit_paramlist(self, name: str, node: ParameterList) -> Any:
        """Visit each parameter of a list."""
        return self.visit_module(name, node)

    def visit_paramdict(self, name: str, node: ParameterDict) -> Any:
        """Visit each parameter of a dict."""
        return self.visit_module(name, node)

    def visit_param(self, name: str, node: Parameter) -> Any:
        """Visit a parameter."""
        return node


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
