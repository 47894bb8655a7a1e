# SPDX-License-Identifier: Apache-2.0
"""Which functions of a module call which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nnfront.ir.module import Function, IRModule


def reached(ir: IRModule, functions: Iterable[Function]) -> set[str]:
    """Return the names of the functions that these call, directly or not."""
    found: set[str] = set()
    pending = list(functions)
    while pending:
        new = set(pending.pop().callees) - found
        found |= new
        pending += [ir[name] for name in new]
    return found


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
