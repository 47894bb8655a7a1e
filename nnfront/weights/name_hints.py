# SPDX-License-Identifier: Apache-2.0
"""Names of tensors for messages: the pattern of a name, the nearest of others, a prefix that two sets of names differ in."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"\d+")
_MOST = 2000
"""Names that are compared letter by letter: more take seconds."""
SHOWN = 20
"""Lines about one thing each that a message shows; more are grouped by the pattern of the names."""


def pattern(name: str) -> str:
    """Return the name with `*` for each number: what the layers of a model have in common."""
    return _NUMBER.sub("*", name)


def shortened(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Return lines, each given with the name that it is about; of many, one for each pattern of names, with a count."""
    if len(lines) <= SHOWN:
        return [line for _, line in lines]
    groups: dict[str, list[str]] = {}
    for name, line in lines:
        groups.setdefault(pattern(name), []).append(line)
    shown = [
        group[0] + (f" (and {len(group) - 1} more like {name!r})" if len(group) > 1 else "")
        for name, group in list(groups.items())[:SHOWN]
    ]
    rest = list(groups.values())[SHOWN:]
    return shown + ([f"and {sum(map(len, rest))} more"] if rest else [])


def nearest(names: Iterable[str], others: Sequence[str]) -> dict[str, str]:
    """Return for each name the nearest of the others, where there is one near enough; numbers in it have to agree."""
    by_numbers: dict[tuple[str, ...], list[str]] = {}
    for other in others:
        by_numbers.setdefault(tuple(_NUMBER.findall(other)), []).append(other)
    found = {}
    for name in names:
        candidates = by_numbers.get(tuple(_NUMBER.findall(name)), [])
        best = difflib.get_close_matches(name, candidates[:_MOST], 1)
        if best:
            found[name] = best[0]
    return found


def common_prefix(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Say which prefix most missing names lack or have too much compared with the unexpected ones; empty if there is none."""
    left = set(unexpected)
    for prefix in dict.fromkeys(f"{name.split('.', 1)[0]}." for name in unexpected if "." in name):
        if 2 * sum(prefix + name in left for name in missing) > len(missing):
            return f"the checkpoint's names begin with {prefix!r}, the model's do not"
    for prefix in dict.fromkeys(f"{name.split('.', 1)[0]}." for name in missing if "." in name):
        if 2 * sum(name.startswith(prefix) and name[len(prefix) :] in left for name in missing) > len(
            missing
        ):
            return f"the model's names begin with {prefix!r}, the checkpoint's do not"
    return ""
