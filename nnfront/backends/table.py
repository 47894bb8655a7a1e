# SPDX-License-Identifier: Apache-2.0
"""The kernels of each target: those of its back end, and those that users have registered, which are asked first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nnfront.backends.registry import backend_of
from nnfront.backends.select import Maker, Rule
from nnfront.lower import Run, reference

_RULES: dict[str, tuple[Rule, ...]] = {}
_KERNELS: dict[str, Maker] = {}


def rules(target: str) -> tuple[Rule, ...]:
    """Return the rules of a target in the order in which they are asked: the one added last, then those before it, then its back end's."""
    backend = backend_of(target)
    return (*_RULES.get(backend.name, ()), *backend.rules)


def resolver(target: str) -> Callable[[Run], Callable[..., Any]]:
    """Return what gives the function that runs an instruction of a target's program. A kernel that is missing is the reference of its op."""
    kernels = backend_of(target).kernels

    def resolve(run: Run) -> Callable[..., Any]:
        return (_KERNELS.get(run.kernel) or kernels.get(run.kernel, reference))(run)

    return resolve


def is_taken(target: str, kernel: str) -> bool:
    """Whether a target has a kernel of this name, or a user has registered one for whatever target."""
    return kernel in _KERNELS or kernel in backend_of(target).kernels


def registered() -> frozenset[str]:
    """The names of kernels that users have registered."""
    return frozenset(_KERNELS)


def add(target: str, rule: Rule, make: Maker) -> None:
    """Put a kernel in front of all others of a target."""
    name = backend_of(target).name
    _RULES[name] = (rule, *_RULES.get(name, ()))
    _KERNELS[rule.kernel] = make


def remove(target: str, kernel: str) -> bool:
    """Take back a kernel that was added; return whether there was one."""
    name = backend_of(target).name
    before = _RULES.get(name, ())
    _RULES[name] = tuple(rule for rule in before if rule.kernel != kernel)
    return len(_RULES[name]) < len(before) and _KERNELS.pop(kernel, None) is not None
