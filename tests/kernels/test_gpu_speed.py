# SPDX-License-Identifier: Apache-2.0
"""How bench/gpu measures: what a model's steps read and compute, and a clock that finds no operand in a cache, without a GPU."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nnfront_kernels.softmax import SoftmaxShape


@pytest.fixture
def parts(monkeypatch):
    """The modules of bench/gpu, without running anything."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench" / "gpu")
    return importlib.import_module("run")


@pytest.fixture
def model(parts):
    return importlib.import_module("model")


def test_memory_is_as_planned_with_a_workspace_of_cublas_or_one_that_is_shared_and_not_else(parts):
    runtime, planned = importlib.import_module("runtime"), 100 << 20
    for taken in (planned, planned + runtime.OF_CUBLAS, 0.85 * planned):
        assert runtime.is_as_planned(taken, planned)
    for taken in (
        planned // 2,
        2 * planned,
    ):  # nothing of what is planned as alive at once was, or a value more
        assert not runtime.is_as_planned(taken, planned)


def test_a_decode_step_reads_all_weights_but_the_embeddings_and_every_token(model):
    config = model.SMALL  # 259 rows of 64 embeddings, 1 layer, 1 key head of 32
    assert model.decode_bytes(10**6, config, 7, None) == 10**6 - 2 * 259 * 64 + 7 * 2 * 32 * 2
    assert model.decode_bytes(10**6, config, 7, "float8_e4m3fn") == 10**6 - 2 * 259 * 64 + 7 * 2 * (32 + 4)


def test_the_work_of_a_prompt_counts_products_and_pairs(model):
    # q and o of 64 x 64, k and v of 64 x 32, three of 64 x 96; 2 heads of 32, 1 + 2 + 3 pairs, two products
    weights = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96
    assert model.prefill_flops(model.SMALL, 3) == 2 * 3 * weights + 2 * 2 * 6 * 2 * 32


class FakeEvent:
    """An event; between two of them each launch takes a millisecond."""

    def record(self) -> None:
        self.at = FakeGraph.launched

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


class FakeGraph:
    """What was done inside of it; a replay counts it."""

    launched = 0.0

    def __init__(self) -> None:
        self.count = 0

    def replay(self) -> None:
        FakeGraph.launched += self.count


@pytest.fixture
def clock(parts, monkeypatch):
    """The clock of a GPU on which a flush takes 1 ms and everything else 3."""
    speed = importlib.import_module("speed")
    current: list[FakeGraph] = []

    @contextmanager
    def capturing(graph: FakeGraph):
        current.append(graph)
        yield
        current.pop()

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(1))
    for name, stand_in in {
        "synchronize": lambda: None,
        "CUDAGraph": FakeGraph,
        "graph": capturing,
        "Event": lambda enable_timing: FakeEvent(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    done: list[str] = []

    def count(name: str, cost: int):
        def work() -> None:
            done.append(name)
            if current:
                current[-1].count += cost

        return work

    monkeypatch.setattr(speed.Clock, "_flush", lambda self: count("flush", 1)())
    return SimpleNamespace(made=speed.Clock("cuda"), count=count, done=done, cold=speed.COLD)


def test_operands_that_fill_the_caches_are_taken_in_turn(clock):
    clock.done.clear()
    works = [clock.count(name, 3) for name in "abc"]
    assert clock.made.us(works, clock.cold // 2) == 3000
    assert "".join(clock.done).endswith("abc" * 4)
    assert "flush" not in clock.done


@pytest.mark.parametrize(("rows", "sets"), [(16, 16), (1 << 13, 2), (1 << 15, 1)])
def test_there_are_as_many_sets_of_operands_as_fill_the_caches_and_16_at_most(parts, monkeypatch, rows, sets):
    speed = importlib.import_module("speed")
    timed: list[tuple[int, int]] = []
    times = SimpleNamespace(device="cuda", us=lambda works, nbytes: timed.append((len(works), nbytes)) or 1.0)
    run = importlib.import_module("cases").Run("softmax", SoftmaxShape(rows, 8192), "bfloat16")
    kernel = speed.RECORDS[run.kernel]
    monkeypatch.setattr(speed, "operands", lambda run, *_: kernel.example(run.shape, run.dtype))
    speed.timed(run, "sm_90", times, False)
    assert timed == [(sets, rows * 8192 * 2)]


def test_between_launches_on_small_operands_others_are_read(clock):
    clock.done.clear()
    assert clock.made.us([clock.count("a", 3)], 100) == 3000
    assert clock.done[-4:] == ["flush", "a", "flush", "a"]
