# SPDX-License-Identifier: Apache-2.0
"""One process among several: its number, what all of them must agree on, and signs of life.

A rank that ends ends all: who waits for it in a collective learns that its connection is gone, and the launcher ends the others. One that hangs
does not, so every rank counts up a number of its own in the launcher's store each second, and looks at those of the others.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from nnfront.backends.registry import backend_of
from nnfront.errors import LoadError, NnfrontError
from nnfront.ops.collective import LostRank

BEAT_SECONDS = 1.0
SILENT_SECONDS = 6.0
"""After so long without a sign of life a rank counts as hung: with what it takes to end all, less than 10 seconds."""
PATIENCE = timedelta(days=365)
"""How long a collective waits for ranks that are alive: a server has nothing to do for as long as nobody asks."""


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where the launcher looks for what has ended a rank."""


class HungRank(LostRank):
    """A rank gave no sign of life for so long that others have ended it."""


class Ranks:
    """The ranks that this process is one of: `rank` of `world`. `joined` makes it, `ALONE` is that of a single process."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    def gathered(self, value: Any) -> list[Any]:
        """What each rank has here, in their order. All ranks call it."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        with _meeting(self.rank):
            dist.all_gather_object(found, value)
        return found

    def from_first(self, value: Any) -> Any:
        """What rank 0 has here: a tensor, in place and on its device, or anything else. All ranks call it."""
        if self.world == 1:
            return value
        with _meeting(self.rank):
            if isinstance(value, torch.Tensor):
                dist.broadcast(value, 0)
                return value
            box = [value]
            dist.broadcast_object_list(box, 0)
        return box[0]

    def agree(self, facts: Mapping[str, str]) -> None:
        """Compare what all ranks must have alike. All ranks call it. Raises LoadError, on every rank, that says in what they differ."""
        found = self.gathered(dict(facts))
        details = []
        for name in dict.fromkeys(name for each in found for name in each):
            said = [each.get(name, "nothing") for each in found]
            if len(set(said)) > 1:
                details.append(f"{name}: " + ", ".join(f"rank {i} has {text}" for i, text in enumerate(said)))
        if details:
            raise LoadError(
                "the ranks do not run the same",
                details=details,
                help="start all of them with the same version, arguments and folder",
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within it each rank does something of its own; if one fails, all raise one LoadError that says which, and why. All ranks enter it."""
        if self.world == 1:
            yield
            return
        problem = ""
        cause: Exception | None = None
        try:
            yield
        except (NnfrontError, OSError, MemoryError, RuntimeError) as error:
            if isinstance(error, LostRank):
                raise
            problem, cause = str(error) or type(error).__name__, error
        found = self.gathered(problem)
        if len(set(found)) == 1 and isinstance(cause, NnfrontError):
            raise cause
        for rank, text in enumerate(found):
            if text:
                raise LoadError(f"rank {rank}: {text}") from cause


ALONE = Ranks(0, 1)
"""A process that computes everything itself."""


@contextmanager
def joined(device: str = "cpu") -> Iterator[Ranks]:
    """Join the ranks that torchrun has started this process among, and leave them at the end.

    device: what they compute on; each takes the GPU of its own number. Raises LoadError if there are fewer GPUs than ranks, LowerError if there is no such back end.
    """
    store, rank, world = next(rendezvous("env://"))
    backend = backend_of(device)
    if backend.gpus:
        take_gpu(int(os.environ.get("LOCAL_RANK", rank)), world)
    store.set(f"process/{rank}", str(os.getpid()))
    dist.init_process_group(  # returns when all ranks are there
        backend.collectives,
        store=PrefixStore("nnfront", store),
        rank=rank,
        world_size=world,
        timeout=PATIENCE,
    )
    done = threading.Event()
    beats = threading.Thread(target=_watch, args=(store, rank, world, done), daemon=True)
    beats.start()
    try:
        yield Ranks(rank, world)
        with _meeting(rank):
            dist.barrier()  # one that leaves earlier would look lost to others
    finally:
        done.set()
        beats.join()
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def take_gpu(number: int, world: int) -> None:
    """Compute on the GPU of this number. Raises LoadError if there are fewer than ranks."""
    there = torch.cuda.device_count()
    if number >= there:
        raise LoadError(
            f"there are {world} ranks, but {there} GPUs",
            help="start as many ranks as there are GPUs, or use --device cpu",
        )
    torch.cuda.set_device(number)


@contextmanager
def _meeting(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRank(
            f"rank {rank}: another rank did not come", details=[str(error).splitlines()[0]]
        ) from error


def _watch(store: Any, rank: int, world: int, done: threading.Event) -> None:
    """Show that this rank is alive, and end the process if another is not, or the launcher is gone."""
    try:
        store = store.clone()  # a connection of its own: the other may wait for long
        seen = dict.fromkeys(range(world), (0, time.monotonic()))
        while not done.wait(BEAT_SECONDS):
            store.add(f"beat/{rank}", 1)
            for other, (count, since) in seen.items():
                now = store.add(f"beat/{other}", 0)
                if now != count:
                    seen[other] = now, time.monotonic()
                elif time.monotonic() - since > SILENT_SECONDS:
                    _end_hung(other, int(store.get(f"process/{other}")))
    except RuntimeError:  # the store is gone, and the launcher with it
        if not done.is_set():
            os._exit(1)


def _end_hung(rank: int, process: int) -> NoReturn:
    """End a rank that hangs, which does not answer when it is asked to, and this process."""
    with suppress(OSError):  # another rank was faster
        os.kill(process, signal.SIGKILL)
    end_with(HungRank(f"rank {rank} hangs: it gave no sign of life for {SILENT_SECONDS:.0f} seconds"))


def end_with(error: BaseException) -> NoReturn:
    """End this process, and leave an error where the launcher finds it; without a launcher that asks for it, say it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if file := os.environ.get(ERROR_FILE):
        # The launcher, which another rank has ended, may read it or end this process at any moment.
        os.environ[ERROR_FILE] = f"{file}.new"
        get_error_handler().record_exception(error)
        os.replace(f"{file}.new", file)
    else:
        print(f"error: {error}", file=sys.__stderr__, flush=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)  # threads that wait for a rank would hold up an ordinary end
