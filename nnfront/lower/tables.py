# SPDX-License-Identifier: Apache-2.0
"""The kernel table of each target, and the rules that users have put in front of it."""

from __future__ import annotations

from collections.abc import Mapping

from nnfront.lower.cpu import CPU
from nnfront.lower.cuda import CUDA
from nnfront.lower.select import Rule

KERNEL_TABLES: Mapping[str, tuple[Rule, ...]] = {"cpu": CPU, "cuda": CUDA}
"""What a target comes with."""

_REGISTERED: dict[str, tuple[Rule, ...]] = {}


def rules(target: str) -> tuple[Rule, ...]:
    """Return the rules of a target (`cuda:sm_90` is a `cuda`) in the order in which they are asked: the one added last, then those before it, then the table."""
    kind = target.partition(":")[0]
    return (*_REGISTERED.get(kind, ()), *KERNEL_TABLES[kind])


def add_rule(target: str, rule: Rule) -> None:
    """Put a rule in front of all others of a target."""
    _REGISTERED[target] = (rule, *_REGISTERED.get(target, ()))


def remove_rule(target: str, kernel: str) -> bool:
    """Take back the rules that were added for a kernel; return whether there were any."""
    before = _REGISTERED.get(target, ())
    _REGISTERED[target] = tuple(rule for rule in before if rule.kernel != kernel)
    return len(_REGISTERED[target]) < len(before)
