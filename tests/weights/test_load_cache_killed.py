# SPDX-License-Identifier: Apache-2.0
"""`load(..., cache=DIR)` that is killed at any moment: what it leaves makes no later load wrong."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from children import kill_at, moments_of
from few_of import few_of
from safetensors.torch import save_file
from test_load_cache import EXECUTABLE, kept, weights

import nnfront as nn


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

    def load(cache: Path) -> nn.Session:
        return EXECUTABLE.load(nn.Checkpoint(folder), cache=cache)

    moments = moments_of(lambda: load(tmp_path / "whole"))
    total = len(kept(tmp_path / "whole"))
    right = EXECUTABLE.load(nn.Checkpoint(folder)).weights
    sizes: list[int] = []
    for i in range(kills):
        cache = tmp_path / f"cache{i // 2}"
        kill_at(lambda cache=cache: load(cache), 1 + moments * i // kills, delay=i % 4 // 2 * 1e-4)
        results = cache / "results"
        sizes.append(
            len([f for f in os.listdir(results) if not f.startswith(".")]) if results.exists() else 0
        )
        snapshot = tmp_path / "snapshot"
        if cache.exists():
            os.rename(cache, snapshot)  # what is checked is the state that the kill has left
        else:
            snapshot.mkdir()
        session = load(_linked(snapshot, tmp_path / f"copy{i}"))
        assert all(torch.equal(session.weights[name], value) for name, value in right.items()), (
            f"after kill {i}"
        )
        os.rename(snapshot, cache)
    assert any(0 < size < total for size in sizes), "no kill came in the middle"


def _linked(folder: Path, copy: Path) -> Path:
    """A copy of a folder that shares its files: nothing here writes into a file that exists."""
    shutil.copytree(folder, copy, copy_function=os.link)
    return copy
