# SPDX-License-Identifier: Apache-2.0
"""Two processes that run kernels, so that this one stays as it is.

Triton decides when it is imported whether `@triton.jit` interprets or compiles, so one process cannot do both. Each
kind of test hands its work to a process of its own; a failed check comes back as the AssertionError it raised there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
from kernel_workers import worker

Call = Callable[..., object]


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Call]:
    """Call a function of a test module where Triton interprets kernels."""
    yield from _elsewhere(interpret="1")


@pytest.fixture(scope="session")
def compiled() -> Iterator[Call]:
    """Call a function of a test module where Triton compiles kernels."""
    yield from _elsewhere(interpret="0")


def _elsewhere(interpret: str) -> Iterator[Call]:
    with worker(interpret) as process:

        @cache  # several tests may look at one result
        def call(function: Call, *arguments: object) -> object:
            return process.submit(function, *arguments).result()

        yield call
