# SPDX-License-Identifier: Apache-2.0
"""Calls and loads for which there is too little memory: the error says what for, and everything is as it was."""

from __future__ import annotations

import weakref

import pytest
import torch
from fake_link import FakeLink

import nnfront as nn
from nnfront import op, ops, spec
from nnfront.backends.cuda import upload
from nnfront.errors import LoadError, RunError
from nnfront.memory.free_memory import FreeMemory
from nnfront.ops import register_extern
from nnfront.runtime import out_of_memory
from nnfront.session import Session

GPU = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.81 GiB."


class Wide(nn.Module):
    """A product whose result is large, with a place in between where memory can run out."""

    def __init__(self) -> None:
        self.up = nn.Linear(16, 1024, bias=False)

    def forward(self, x: nn.Tensor, cache) -> nn.Tensor:
        y = self.up(x)
        k = op.reshape(y[:, :, :8], (x.shape[0], x.shape[1], 1, 8))
        seen = op.attention(k, k, k, cache=cache[0])
        y = op.extern("test_out_of_memory.step", (y,), y)
        return y + seen[:, :, :, 0]


@pytest.fixture
def step():
    """What happens in the middle of a call: `step.action` gets the tensor."""

    class Step:
        action = staticmethod(lambda x: x)

    ops.control._EXTERNS.pop("test_out_of_memory.step", None)
    register_extern("test_out_of_memory.step", lambda x: Step.action(x))
    return Step


def session() -> Session:
    cache = spec.Cache(1, 1, 8, "float32", nn.Dim("batch", min=1), nn.Dim("max_seq", min=1, max=64))
    seq = nn.Dim("seq", min=1, max=64)
    ir = Wide().export({"forward": {"x": spec.Tensor([nn.Dim("batch", min=1), seq, 16]), "cache": cache}})
    return nn.compile(ir).load({"up.weight": torch.randn(1024, 16)})


def fail(error: Exception):
    def action(x: torch.Tensor) -> torch.Tensor:
        raise error

    return action


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError(GPU), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2097152 bytes.")],
    ids=["GPU", "CPU"],
)  # fmt: skip
def test_a_call_that_runs_out_of_memory_says_where_and_what_would_fit(step, monkeypatch, error):
    run = session()
    cache = run.make_cache(batch=2, max_seq=64)
    run["forward"](torch.randn(2, 3, 16), cache)
    step.action = fail(error)
    free = 100_000
    monkeypatch.setattr(out_of_memory, "free_memory_on", lambda device: FreeMemory(free, 1 << 30, "a GPU"))
    with pytest.raises(RunError) as caught:
        run["forward"](torch.randn(2, 32, 16), cache)
    found = caught.value

    def peak(batch: int, seq: int) -> int:
        return run.memory(batch=batch, seq=seq, max_seq=64).methods["forward"].plan.peak

    fits = max(seq for seq in range(1, 33) if peak(2, seq) <= free)
    assert found.what == "forward: out of memory"
    assert found.details == (
        "asked for: 2.00 MiB",
        f"the call takes up to {peak(2, 32) / 1024:.2f} KiB with batch=2, seq=32, max_seq=64",
        "without it 97.66 KiB of 1.00 GiB are free on a GPU",
        f"fits: seq up to {fits}",
    )
    assert found.where.startswith("the external function 'test_out_of_memory.step', method 'forward'")
    assert peak(1, 32) > free
    assert cache.lengths == [3, 3]
    step.action = lambda x: x
    run["forward"](torch.randn(2, 1, 16), cache)
    assert cache.lengths == [4, 4]


def test_what_a_failed_call_has_made_is_let_go_of(step):
    run = session()
    made = []

    def action(x: torch.Tensor) -> torch.Tensor:
        inside = torch.ones(3)
        made.extend(weakref.ref(t) for t in (x, inside))
        raise torch.OutOfMemoryError(GPU)

    step.action = action
    with pytest.raises(RunError, match="out of memory"):
        run["forward"](torch.randn(1, 2, 16), run.make_cache(batch=1, max_seq=64))
    assert [ref() for ref in made] == [None, None]


def test_other_errors_of_a_call_are_not_called_so(step):
    run = session()
    step.action = fail(RuntimeError("no such luck"))
    with pytest.raises(RunError, match="failed with RuntimeError: no such luck"):
        run["forward"](torch.randn(1, 2, 16), run.make_cache(batch=1, max_seq=64))


class Two(nn.Module):
    def __init__(self) -> None:
        self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(16, 512, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.b(self.a(x))


def load(monkeypatch, link: FakeLink) -> Session:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(upload, "link_to", lambda device: link)
    monkeypatch.setattr(upload, "free_memory_on", lambda device: FreeMemory(1 << 10, 1 << 20, "a GPU"))
    ir = Two().export({"forward": {"x": spec.Tensor(["n", 8])}})
    weights = {"a.weight": torch.randn(16, 8), "b.weight": torch.randn(512, 16)}
    return nn.compile(ir, target="cuda").load(weights)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(GPU), RuntimeError("CUDA error: out of memory")])
def test_a_load_that_runs_out_of_memory_says_which_weight_and_how_far_it_came(monkeypatch, error):
    def fails(what: str, size: int) -> None:
        if what == "empty" and size == 512 * 16 * 4:
            raise error

    link = FakeLink(fails=fails)
    with pytest.raises(LoadError) as caught:
        load(monkeypatch, link)
    assert caught.value.what == "there is no room for weight 'b.weight': it takes 32.00 KiB"
    assert caught.value.details == (
        "1.00 KiB of 1.00 MiB are free on a GPU",
        "weights before it took 512 B of 32.50 KiB that all weights take",
    )
    assert not link.pending


def test_a_load_without_pinned_memory_says_how_much_it_wants(monkeypatch):
    def fails(what: str, size: int) -> None:
        if what == "pinned":
            raise RuntimeError("CUDA error: out of memory\nand more")

    with pytest.raises(LoadError) as caught:
        load(monkeypatch, FakeLink(fails=fails))
    assert caught.value.what == "there is no pinned memory to load through: 32.00 MiB were asked for"
    assert caught.value.details == ("CUDA error: out of memory",)
