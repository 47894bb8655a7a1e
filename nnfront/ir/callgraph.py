# SPDX-License-Identifier: Apache-2.0
"""Which functions of a module call which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from nnfront.ir.expr import Call
from nnfront.ir.module import Function, IRModule
from nnfront.ir.walk import functions_of, walk_exprs


def reached(ir: Mapping[str, Function], functions: Iterable[Function]) -> set[str]:
    """Return the names of the functions that these call, directly or not."""
    found: set[str] = set()
    pending = list(functions)
    while pending:
        new = set(pending.pop().callees) - found
        found |= new
        pending += [ir[name] for name in new]
    return found


def given_to_ops(ir: IRModule) -> set[str]:
    """Return the names of the functions that ops are given, and of those that these call: what calls them is no expression that a pass could rewrite."""
    calls = (e for f in ir.functions for e in walk_exprs(f) if isinstance(e, Call) and e.attrs)
    named = [ir[name] for call in calls for name in functions_of(call)]
    return reached(ir, named) | {f.name for f in named}


def callees_first(ir: IRModule) -> Iterator[Function]:
    """Yield each function behind those that it calls; there is no cycle in a verified module."""
    done: set[str] = set()
    pending = [(name, False) for name in reversed(list(ir))]
    while pending:
        name, is_ready = pending.pop()
        if is_ready:
            yield ir[name]
        elif name not in done:
            done.add(name)
            pending.append((name, True))
            pending.extend((callee, False) for callee in ir[name].callees)
