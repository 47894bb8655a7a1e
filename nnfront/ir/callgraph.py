# SPDX-License-Identifier: Apache-2.0
"""Which functions of a module call which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from graphlib import TopologicalSorter

from nnfront.ir.expr import Call
from nnfront.ir.module import Function, IRModule
from nnfront.ir.walk import functions_of, reachable, walk_exprs


def reached(ir: Mapping[str, Function], functions: Iterable[Function]) -> set[str]:
    """Return the names of the functions that these call, directly or not."""
    called = [name for function in functions for name in function.callees]
    return set(reachable(called, lambda name: ir[name].callees))


def given_to_ops(ir: IRModule) -> set[str]:
    """Return the names of the functions that ops are given, and of those that these call: what calls them is no expression that a pass could rewrite."""
    calls = (e for f in ir.functions for e in walk_exprs(f) if isinstance(e, Call) and e.attrs)
    named = [ir[name] for call in calls for name in functions_of(call)]
    return reached(ir, named) | {f.name for f in named}


def callees_first(ir: IRModule) -> Iterator[Function]:
    """Yield each function behind those that it calls; there is no cycle in a verified module."""
    calls = {name: function.callees for name, function in ir.items()}
    return (ir[name] for name in TopologicalSorter(calls).static_order())
