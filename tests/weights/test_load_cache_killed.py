# SPDX-License-Identifier: Apache-2.0
"""`load(..., cache=DIR)` that is killed at any moment: what it leaves makes no later load wrong."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from few_of import few_of
from safetensors.torch import save_file
from test_load_cache import EXECUTABLE, kept, weights

import nnfront as nn


def _load_in_child(folder: Path, cache: Path) -> int:
    """Start a load in a copy of this process, which has everything imported, and return its id."""
    child = os.fork()
    if not child:
        try:
            EXECUTABLE.load(nn.Checkpoint(folder), cache=cache)
        finally:
            os._exit(0)
    return child


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
    """Two kills for each cache, evenly over the time that a load takes; after each the results are those without a cache."""
    tmp_path, folder = quick_path, quick_path / "model"
    folder.mkdir()
    save_file(weights(), folder / "model.safetensors")
    start = time.perf_counter()
    os.waitpid(_load_in_child(folder, tmp_path / "timed"), 0)
    seconds = time.perf_counter() - start
    total = len(kept(tmp_path / "timed"))
    right = EXECUTABLE.load(nn.Checkpoint(folder)).weights
    sizes: list[int] = []
    for i in range(kills):
        cache = tmp_path / f"cache{i // 2}"
        child = _load_in_child(folder, cache)
        time.sleep(seconds * i / kills)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
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
