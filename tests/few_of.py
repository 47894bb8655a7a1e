# SPDX-License-Identifier: Apache-2.0
"""The two tiers of the tests: each claim on a few cases in `make test`, on all of them in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few_of(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """The cases for `parametrize`, of which so many, evenly from the first to the last, run in `make test`; the others are marked `matrix`.

    A case for several parameters is a tuple, as for `parametrize`.
    """
    found = [_param(case) for case in cases]
    kept = {i * (len(found) - 1) // max(count - 1, 1) for i in range(count)}
    return [each if i in kept else _in_matrix(each) for i, each in enumerate(found)]


def _param(case: Any) -> Any:
    if hasattr(case, "marks"):
        return case
    return pytest.param(*case) if type(case) is tuple else pytest.param(case)


def _in_matrix(case: Any) -> Any:
    return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.matrix])
