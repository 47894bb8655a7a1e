# SPDX-License-Identifier: Apache-2.0
"""Processes that use one cache or one artefact at once do not notice each other, and clean up behind those that were killed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from artefact_cases import llama_weights, outputs, varied_session, weight, write_folder
from children import code_of, in_child, kill_at, moments_of
from safetensors.torch import save_file
from test_transform_cache import assert_right, bound, cached_transform, program_of, weights

import nnfront as nn

FACTORS = (2.0, 3.0, 4.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file(weights(), tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def share_a_cold_cache(folder: Path, place: Path, rounds: int) -> None:
    program, source = program_of(*FACTORS), weights()

    def load(cache: Path, begin: tuple[int, int]) -> None:
        os.close(begin[1])
        os.read(begin[0], 1)  # all at once, when nobody holds the other end
        assert_right(cached_transform(program, bound(folder), cache), source, FACTORS)

    for i in range(rounds):
        cache, begin = place / f"cache{i}", os.pipe()
        children = [in_child(lambda c=cache, b=begin: load(c, b)) for _ in range(3)]
        os.close(begin[1])
        os.close(begin[0])
        assert [code_of(child) for child in children] == [0, 0, 0]
        left = [f.name for f in cache.rglob("*") if f.suffix == ".tmp"]
        assert not left
        shutil.rmtree(cache)


def test_processes_that_share_a_cold_cache_all_succeed(folder: Path, tmp_path: Path) -> None:
    share_a_cold_cache(folder, tmp_path, 3)


@pytest.mark.slow
def test_processes_that_share_a_cold_cache_all_succeed_for_long(folder: Path, tmp_path: Path) -> None:
    share_a_cold_cache(folder, tmp_path, 400)


def kill_writers(folder: Path, cache: Path, count: int) -> None:
    program = program_of(*FACTORS)

    def write() -> None:
        for result in cache.glob("results/[!.]*"):
            result.unlink()
        cached_transform(program, bound(folder), cache)

    write()
    moments = moments_of(write)
    for i in range(count):
        kill_at(write, 1 + moments * i // count, delay=i % 4 // 2 * 1e-4)
    assert_right(cached_transform(program, bound(folder), cache), weights(), FACTORS)
    assert not [f.name for f in cache.rglob("*") if f.suffix == ".tmp"]


def test_killed_writers_leave_nothing_behind_once_the_cache_is_used_again(
    folder: Path, tmp_path: Path
) -> None:
    kill_writers(folder, tmp_path / "cache", 12)


@pytest.mark.slow
def test_many_killed_writers_leave_nothing_behind(folder: Path, tmp_path: Path) -> None:
    kill_writers(folder, tmp_path / "cache", 500)


def load_while_it_is_replaced(place: Path, loads: int) -> None:
    """At least so many times, and until both of the artefacts have been found."""
    old, new = varied_session(), varied_session()
    new.update({"up.bias": weight("other", (6,))})
    expected = [outputs(old), outputs(new)]
    old.save(place)

    def replace() -> None:
        while True:
            new.save(place)
            old.save(place)

    child = in_child(replace)
    found = [0, 0]
    try:
        while sum(found) < loads or not all(found):
            got = outputs(nn.load(place))
            which = [all(map(torch.equal, got, each)) for each in expected]
            assert sum(which) == 1  # one of the two, and nothing of the other
            found[which.index(True)] += 1
            assert nn.artefact.check(place) == []
            assert os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    finally:
        os.kill(child, signal.SIGKILL)
        code_of(child)


def test_an_artefact_that_is_replaced_again_and_again_loads(tmp_path: Path) -> None:
    load_while_it_is_replaced(tmp_path / "a", 20)


@pytest.mark.slow
def test_an_artefact_that_is_replaced_again_and_again_loads_for_long(tmp_path: Path) -> None:
    load_while_it_is_replaced(tmp_path / "a", 2000)


def test_a_language_model_keeps_its_tokenizer_when_its_artefact_is_replaced(tmp_path: Path) -> None:
    """Text goes through the tokenizer that was there when the weights were loaded, and is saved with it."""
    nn.LLM.load(write_folder(tmp_path / "one")).save(tmp_path / "a")
    other = write_folder(tmp_path / "two")
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"a": 1, "b": 2', '"a": 2, "b": 1'))
    save_file({n: t + 1 for n, t in llama_weights().items()}, other / "model.safetensors")
    first = nn.LLM.load(tmp_path / "a")
    nn.LLM.load(other).save(tmp_path / "a")
    assert nn.LLM.load(tmp_path / "a").tokenizer.encode("a b") == [2, 1]
    assert first.tokenizer.encode("a b") == [1, 2]
    first.save(tmp_path / "again")
    assert nn.LLM.load(tmp_path / "again").tokenizer.encode("a b") == [1, 2]


def test_a_writer_that_finds_its_file_taken_for_a_dead_ones_makes_another(
    tmp_path: Path, monkeypatch: Any
) -> None:
    from nnfront.weights import temporary

    flock, taken = temporary.fcntl.flock, []

    def slow(fd: int, how: int) -> None:
        if not taken:  # before the lock: another process is cleaning up
            taken.extend(tmp_path.iterdir())
            temporary.remove_dead(taken)
        flock(fd, how)

    monkeypatch.setattr(temporary.fcntl, "flock", slow)
    file, fd = temporary.make_file(tmp_path / "x", ".tmp")
    assert len(taken) == 1
    assert not taken[0].exists()
    assert file.exists()
    os.close(fd)
