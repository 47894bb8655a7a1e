# SPDX-License-Identifier: Apache-2.0
"""Out of memory: what errors of torch say, and what is made of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nnfront.memory.free_memory import FreeMemory, asked, free_memory_on, is_out_of_memory, most

GPU = (
    "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.20 GiB is free. "
    "Process 1 has 138.61 GiB memory in use."
)


def cpu_error() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    return caught.value


def test_an_error_says_how_much_was_asked_for():
    assert asked(torch.OutOfMemoryError(GPU)) == int(20.5 * (1 << 30))
    assert asked(cpu_error()) == 1 << 55
    assert asked(RuntimeError("CUDA error: out of memory")) is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(GPU), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_allocations_are_told_from_others(error, expected):
    assert is_out_of_memory(error) is expected


def test_the_error_of_the_cpu_is_one():
    assert is_out_of_memory(cpu_error())


@given(high=st.integers(0, 1000), limit=st.integers(-3, 1200))
def test_the_most_is_the_last_number_that_fits(high, limit):
    assert most(high, lambda n: n <= limit) == max(min(high, limit), 0)


def test_the_room_of_the_cpu_is_part_of_its_memory():
    room = free_memory_on(torch.device("cpu"))
    assert room is not None
    assert 0 < room.free <= room.total


def test_a_room_says_what_is_free_of_what():
    assert str(FreeMemory(3 << 29, 8 << 30, "cuda:0")) == "1.50 GiB of 8.00 GiB are free on cuda:0"


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_room_of_a_gpu_has_what_torch_keeps_for_itself(kind, monkeypatch):
    figures = {
        "mem_get_info": (10, 100),
        "memory_reserved": 30,
        "memory_allocated": 25,
        "get_device_name": "a GPU",
    }
    for name, value in figures.items():
        monkeypatch.setattr(getattr(torch, kind), name, lambda device, value=value: value)
    assert free_memory_on(torch.device(kind, 1)) == FreeMemory(15, 100, f"{kind}:1 (a GPU)")
