# SPDX-License-Identifier: Apache-2.0
"""Arguments such as `batch=1`: numbers for dims."""

from __future__ import annotations

from collections.abc import Sequence

from nnfront.errors import RunError


def read_sizes(words: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Return the words that are names alone, and the numbers of dims. Raises RunError for what is neither."""
    names, sizes = [], {}
    for word in words:
        name, equals, number = word.partition("=")
        if not equals:
            names.append(word)
        elif name and number.isdecimal():
            sizes[name] = int(number)
        else:
            raise RunError(f"{word} gives no number for a dim", help="write the dim and its size: batch=1")
    return names, sizes
