# SPDX-License-Identifier: Apache-2.0
"""The largest of a row of scores, and draws by their weights, in a few passes over it: a vocabulary is never sorted.

Maxima of columns come by comparing rows of 64 with each other, many at a time, and `count` of them say how large the `count` largest are at least; what
reaches that is little more than what is wanted, and is looked at one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]
Wide = npt.NDArray[np.float64]

STEEPEST = 1e30
"""So much do weights tell scores apart at most: what they cannot is equal in float32."""
COLUMN = 64
BLOCK = 256
FEW = (64, 1024)
"""How many of the largest are looked at for those that reach a part of all, before as many as it may take."""


def largest(row: Row, count: int) -> Tokens:
    """Where the `count` largest of a row are, and those that are equal to the last of them, in the order of the row. What is -inf is none of them."""
    few = _reaching(row, count)
    if len(few) > count:
        found = row[few]
        few = few[found >= np.partition(found, len(few) - count)[len(few) - count]]
    return few


def _reaching(row: Row, count: int) -> Tokens:
    """Where the `count` largest are, and others."""
    columns = len(row) // COLUMN
    least = -np.inf
    if count <= columns:
        maxima = row[: columns * COLUMN].reshape(COLUMN, columns).max(0)
        least = np.partition(maxima, columns - count)[columns - count]
    return np.flatnonzero(row >= least if least > -np.inf else row > -np.inf)


def weights(row: Row, temperature: float) -> Row:
    """exp((row - its largest) / temperature)."""
    made: Row = row - row.max()
    if temperature != 1:
        made *= np.float32(min(1 / temperature, STEEPEST))
    np.exp(made, out=made)
    return made


def nucleus(weights: Row, part: float) -> Tokens:
    """Where the fewest weights are that reach a part of all, the largest first; of equal ones the first."""
    total = float(weights.sum())
    for count in FEW:
        few = _reaching(weights, count)
        if weights[few].sum(dtype=np.float64) > (part + 1e-6) * total:
            break
    else:
        few = np.flatnonzero(
            weights >= (1 - part) * total / len(weights)
        )  # all smaller ones are too little together
    few = few[np.argsort(-weights[few], kind="stable")]
    sums = weights[few].cumsum(dtype=np.float64)
    return few[: int(sums.searchsorted(part * total, "left")) + 1]


def drawn(weights: Row, number: float) -> int:
    """Where a row is when the sum of its weights passes a part of all, 0 <= number < 1; never at a weight of 0."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)).cumsum(dtype=np.float64)
    wanted = number * sums[-1]
    block = min(int(sums.searchsorted(wanted, "right")), len(sums) - 1)
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    before = sums[block - 1] if block else 0.0
    at = int(inside.cumsum(dtype=np.float64).searchsorted(wanted - before, "right"))
    return block * BLOCK + min(at, int(np.flatnonzero(inside)[-1]))
