# SPDX-License-Identifier: Apache-2.0
"""Two processes that run kernels, so that this one stays as it is.

Triton decides when it is imported whether `@triton.jit` interprets or compiles, so one process cannot do both. Each
kind of test hands its work to a process of its own; a failed check comes back as the AssertionError it raised there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from kernel_workers import worker_pool

Call = Callable[..., object]

# What TRITON_INTERPRET is in the processes of each fixture.
INTERPRET = {"interpreted": "1", "compiled": "0"}
CALLS = pytest.StashKey[dict[str, Call]]()
PROCESSES = pytest.StashKey[ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ahead(function): run function(*parameters) in the fixture's process early"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels last: their processes work while all other tests run."""
    items.sort(key=lambda item: Path(__file__).parent in item.path.parents)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the processes that tests will want."""
    processes = session.stash[PROCESSES] = ExitStack()
    calls = session.stash[CALLS] = {}
    for fixture, interpret in INTERPRET.items():
        items = [item for item in session.items if fixture in getattr(item, "fixturenames", ())]
        if items and not session.config.option.collectonly:
            pool = processes.enter_context(worker_pool(interpret))
            calls[fixture] = _ahead(pool, items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.stash.get(PROCESSES, ExitStack()).close()


@pytest.fixture(scope="session")
def interpreted(request: pytest.FixtureRequest) -> Call:
    """Call a function of a test module where Triton interprets kernels."""
    return request.session.stash[CALLS]["interpreted"]


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest) -> Call:
    """Call a function of a test module where Triton compiles kernels."""
    return request.session.stash[CALLS]["compiled"]


def _ahead(pool: ProcessPoolExecutor, items: Sequence[pytest.Item]) -> Call:
    """Submit to the pool, alike work once. Tests marked `ahead(function)` are under way before they ask, so that no process idles."""
    started = {}
    for item in items:
        marker = item.get_closest_marker("ahead")
        if marker:
            work = (marker.args[0], *item.callspec.params.values())
            if work not in started:  # several tests may look at one result
                started[work] = pool.submit(*work)

    def call(function: Callable[..., object], *arguments: object) -> object:
        work = started.get((function, *arguments)) or pool.submit(function, *arguments)
        return work.result()

    return call
