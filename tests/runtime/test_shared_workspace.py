# SPDX-License-Identifier: Apache-2.0
"""The workspace that launches of one stream share: made once, larger where it has to be, and never taken from under a graph."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nnfront_kernels import split_k
from nnfront_kernels.split_k import Sizes

from nnfront.backends.cuda import shared_workspace
from nnfront.backends.cuda.shared_workspace import SharedWorkspace, sharing

CPU = torch.device("cpu")


def partial_of(sizes: Sizes) -> torch.Tensor:
    found = split_k.pointers(None, sizes, CPU)["partial_ptr"]
    assert found is not None
    return found


def test_launches_share_what_is_large_enough() -> None:
    lender = SharedWorkspace()
    with sharing(lender):
        first = partial_of(Sizes(100, 10))
        assert partial_of(Sizes(7, 3)) is first
        assert partial_of(Sizes(100, 10)) is first


def test_what_is_too_small_is_kept_for_the_graphs_that_use_it() -> None:
    lender = SharedWorkspace()
    small = lender(Sizes(100, 10), CPU)
    large = lender(Sizes(101, 1), CPU)
    assert (large.partial.numel(), large.arrived.numel()) == (200, 20)
    assert not large.arrived.any()
    assert lender._made[0] is small


def test_without_a_lender_each_launch_has_its_own() -> None:
    assert partial_of(Sizes(5, 1)) is not partial_of(Sizes(5, 1))


def test_each_thread_that_interprets_has_its_own() -> None:
    found: list[torch.Tensor] = []

    def work() -> None:
        with sharing():
            found.append(partial_of(Sizes(5, 1)))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert found[0] is found[2]
    assert found[0] is not found[1]


def test_a_lender_outside_stays() -> None:
    outer = SharedWorkspace()
    with sharing(outer), sharing():
        partial_of(Sizes(5, 1))
    assert len(outer._made) == 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU with a current stream, which may be capturing; its memory is that of the CPU."""
    state = SimpleNamespace(stream=7, capturing=False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=state.stream)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    whole = split_k.allocated
    monkeypatch.setattr(split_k, "allocated", lambda sizes, device: whole(sizes, CPU))
    monkeypatch.setattr(shared_workspace, "_STREAMS", {})
    return state


def lent(number: int) -> Any:
    return shared_workspace._of_stream(Sizes(5, 1), torch.device("cuda", number))


def test_each_stream_of_each_gpu_has_its_own(gpu: SimpleNamespace) -> None:
    first = lent(0)
    assert lent(0) is first
    assert lent(1) is not first
    gpu.stream = 8
    assert lent(0) is not first


def test_what_somebody_captures_has_its_own(gpu: SimpleNamespace) -> None:
    first = lent(0)
    gpu.capturing = True
    assert lent(0) is not first
    own = SharedWorkspace()
    grown = own(Sizes(5, 1), torch.device("cuda", 0))
    gpu.capturing = False
    assert own(Sizes(5, 1), torch.device("cuda", 0)) is not grown, "its zeros are written by a graph"
