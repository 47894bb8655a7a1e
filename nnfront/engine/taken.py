# SPDX-License-Identifier: Apache-2.0
"""What the host takes of the logits of a call: of a request that is plain the token, drawn by a kernel where the logits are, of others the logits.

Whether a request is plain is said by its parameters alone, so its tokens are the same whoever is computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from nnfront.backends.cuda.sampling import draw_at, takes
from nnfront.backends.device import fetching, sent
from nnfront.engine.draw import Draw, Way
from nnfront.engine.likely import Row

Asked: TypeAlias = tuple[Draw, int]
"""Who draws from a row, and how many tokens it has drawn before."""


def draws_there(logits: torch.Tensor) -> bool:
    """Whether a kernel draws where the logits are, [rows, vocab]."""
    return logits.is_cuda and takes(logits)


def taken(logits: torch.Tensor, asked: Sequence[Asked | None]) -> list[Row | int]:
    """Of each row of [rows, vocab] the token, or the row; of a row that nobody draws from either, nothing is read for it."""
    if not draws_there(logits):
        return [*fetching(logits)().numpy()]
    groups: dict[Way | None, dict[int, Asked]] = {}
    for i, each in enumerate(asked):
        if each is not None:
            groups.setdefault(each[0].way, {})[i] = each
    fetches = []
    for way, group in groups.items():
        is_all = len(group) == len(logits)
        rows = logits if is_all else logits[sent([*group], torch.int64, logits.device)]
        if way is not None:
            rows = draw_at(rows, way._asdict(), [(draw.seed, drawn) for draw, drawn in group.values()])
        fetches.append((way, group, fetching(rows)))
    found: list[Row | int] = [-1] * len(asked)
    for way, group, fetched in fetches:
        for i, each in zip(group, fetched().numpy() if way is None else fetched().tolist(), strict=True):
            found[i] = each
    return found
