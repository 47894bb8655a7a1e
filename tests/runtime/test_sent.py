# SPDX-License-Identifier: Apache-2.0
"""Numbers go to a GPU and tokens come from it without the host waiting for what the GPU does meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nnfront.backends import device
from nnfront.lower import StateType, kv_layer
from nnfront.state import lengths, page_table
from nnfront.state.contiguous import make_cache

GPU = torch.device("cuda", 1)


def cache(sizes: int) -> Any:
    return make_cache(StateType((kv_layer(1, 8, "float32", 2, 64),) * sizes), {}, page_size=16)


def test_a_step_over_pages_sends_one_table_at_a_new_page_and_else_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, sent = cache(3), []
    for module in (page_table, lengths):
        whole = module.sent
        monkeypatch.setattr(module, "sent", lambda *given, whole=whole: sent.append(given) or whole(*given))
    counts = []
    for _ in range(34):
        sent.clear()
        for layer in made:
            layer.take(1)
        counts.append(len(sent))
    assert counts == [int(step % 16 == 0) for step in range(34)]
    assert made[0].lengths.counts().tolist() == [34, 34], "sent when somebody asks"
    assert len(sent) == 1
    assert made[0].lengths.counts().tolist() == [34, 34]
    assert len(sent) == 1


class Pinned:
    """A tensor in pinned memory that writes down how it is copied."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def pin_memory(self) -> Pinned:
        self.log.append("pinned")
        return self

    def to(self, where: torch.device, *, non_blocking: bool) -> str:
        self.log.append((where, non_blocking))
        return "there"


def test_numbers_go_to_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    def tensor(values: Any, *, dtype: torch.dtype, device: torch.device) -> Pinned:
        log.append(device.type)
        return Pinned(log)

    monkeypatch.setattr(torch, "tensor", tensor)
    assert device.sent([1, 2], torch.int32, GPU) == "there"  # type: ignore[comparison-overlap]
    assert log == ["cpu", "pinned", (GPU, True)]


def test_a_token_is_waited_for_and_nothing_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    host = SimpleNamespace(copy_=lambda source, non_blocking: log.append(("copied", non_blocking)))
    event = SimpleNamespace(
        record=lambda stream: log.append(("event", stream)), synchronize=lambda: log.append("waited")
    )
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, pin_memory: host)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: where)
    token = SimpleNamespace(device=GPU, shape=(2,), dtype=torch.int64)
    fetched = device.fetching(token)  # type: ignore[arg-type]
    log.append("the next step")
    assert fetched() is host
    assert log == [("copied", True), ("event", GPU), "the next step", "waited"]


def test_on_a_cpu_a_token_is_there() -> None:
    token = torch.ones(2)
    assert device.fetching(token)() is token
