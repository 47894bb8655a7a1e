# SPDX-License-Identifier: Apache-2.0
"""`load(..., cache=DIR)` that is killed at any moment: what it leaves makes no later load wrong."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from few_of import few_of
from safetensors.torch import save_file
from test_load_cache import EXECUTABLE, kept, weights

import nnfront as nn


def _load_in_child(folder: Path, cache: Path, before: Callable[[int], None]) -> None:
    """Load in a copy of this process, which has everything imported; before each time that it asks the file system, `before` is told which time it is.

    So a kill is placed by what the load has done, not by a clock: it comes in the middle on a machine of any speed.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    asked = 0

    def count(event: str, _: object) -> None:
        nonlocal asked
        if event == "open" or event.startswith(("os.", "fcntl.")):
            asked += 1
            before(asked)

    try:
        sys.addaudithook(count)
        EXECUTABLE.load(nn.Checkpoint(folder), cache=cache)
    finally:
        os._exit(0)


def _kill_at(moment: int, delay: float) -> Callable[[int], None]:
    """Kill this process before it asks for the `moment`-th time, or so many seconds after that, which may be while it writes."""

    def kill(asked: int) -> None:
        if asked == moment and delay:
            signal.setitimer(
                signal.ITIMER_REAL, delay
            )  # nobody handles its signal, so the system ends the process
        elif asked == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


@pytest.fixture
def quick_path(tmp_path) -> Iterator[Path]:
    """A folder in memory where there is one: a kill is no power failure, so nothing has to reach a disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("kills", few_of([16, 100]))
def test_a_kill_at_any_moment_leaves_nothing_wrong(quick_path, kills: int):
    """Two kills for each cache, evenly over what a load asks of the file system; after each the results are those without a cache."""
    tmp_path, folder = quick_path, quick_path / "model"
    folder.mkdir()
    save_file(weights(), folder / "model.safetensors")
    reader, writer = os.pipe()
    _load_in_child(folder, tmp_path / "whole", lambda _: os.write(writer, b"."))
    moments = len(os.read(reader, 1 << 16))
    os.close(reader)
    os.close(writer)
    total = len(kept(tmp_path / "whole"))
    right = EXECUTABLE.load(nn.Checkpoint(folder)).weights
    sizes: list[int] = []
    for i in range(kills):
        cache = tmp_path / f"cache{i // 2}"
        _load_in_child(folder, cache, _kill_at(1 + moments * i // kills, delay=i % 4 // 2 * 1e-4))
        results = cache / "results"
        sizes.append(
            len([f for f in os.listdir(results) if not f.startswith(".")]) if results.exists() else 0
        )
        snapshot = tmp_path / "snapshot"
        if cache.exists():
            os.rename(cache, snapshot)  # what is checked is the state that the kill has left
        else:
            snapshot.mkdir()
        session = EXECUTABLE.load(nn.Checkpoint(folder), cache=_linked(snapshot, tmp_path / f"copy{i}"))
        assert all(torch.equal(session.weights[name], value) for name, value in right.items()), (
            f"after kill {i}"
        )
        os.rename(snapshot, cache)
    assert any(0 < size < total for size in sizes), "no kill came in the middle"


def _linked(folder: Path, copy: Path) -> Path:
    """A copy of a folder that shares its files: nothing here writes into a file that exists."""
    shutil.copytree(folder, copy, copy_function=os.link)
    return copy
