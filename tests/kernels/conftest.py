# SPDX-License-Identifier: Apache-2.0
"""Two processes that run kernels, so that this one stays as it is.

Triton decides when it is imported whether `@triton.jit` interprets or compiles, so one process cannot do both. Each
kind of test hands its work to a process of its own; a failed check comes back as the AssertionError it raised there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from kernel_workers import worker_pool


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ahead(function): run function(*parameters) in the fixture's process early"
    )


@pytest.fixture(scope="session")
def interpreted(request: pytest.FixtureRequest) -> Iterator[Callable[..., object]]:
    """Call a function of a test module where Triton interprets kernels."""
    with worker_pool("1") as pool:
        yield _ahead(pool, request.session.items, "interpreted")


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest) -> Iterator[Callable[..., object]]:
    """Call a function of a test module where Triton compiles kernels."""
    with worker_pool("0") as pool:
        yield _ahead(pool, request.session.items, "compiled")


def _ahead(pool: ProcessPoolExecutor, items: list[pytest.Item], fixture: str) -> Callable[..., object]:
    """Submit to the pool. Tests marked `ahead(function)` are under way before they ask, so that no process idles."""
    started = {}
    for item in items:
        marker = item.get_closest_marker("ahead")
        if marker and fixture in item.fixturenames:
            work = (marker.args[0], *item.callspec.params.values())
            started[work] = pool.submit(*work)

    def call(function: Callable[..., object], *arguments: object) -> object:
        work = started.get((function, *arguments)) or pool.submit(function, *arguments)
        return work.result()

    return call
