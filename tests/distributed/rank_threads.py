# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process, whose collectives meet at a barrier: quick, and every one of them is on record."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from patience import HANGS_SECONDS

Result = TypeVar("Result")


class Threads:
    """`world` ranks. `record` is what each rank has met in: name and shape, in order."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.here = world, threading.local()
        self.barrier = threading.Barrier(world, timeout=HANGS_SECONDS)
        self.shared: list[Any] = [None] * world
        self.record: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(world)]
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: world)
        monkeypatch.setattr(dist, "get_rank", lambda: self.here.rank)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(dist, "all_gather", self.all_gather)

    def exchange(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        self.record[self.here.rank].append((name, tuple(x.shape)))
        self.shared[self.here.rank] = x.clone()
        self.barrier.wait()
        found = list(self.shared)
        self.barrier.wait()
        return found

    def all_reduce(self, x: torch.Tensor) -> None:
        x.copy_(torch.stack(self.exchange("all_reduce", x)).sum(0))

    def all_gather(self, out: list[torch.Tensor], x: torch.Tensor) -> None:
        for mine, its in zip(out, self.exchange("all_gather", x), strict=True):
            mine.copy_(its)

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """What `work(rank)` returns on each rank; raises what the first of them raised."""
        results: list[Any] = [None] * self.world
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            self.here.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results
