# SPDX-License-Identifier: Apache-2.0
"""What runs in Ray's processes: one copy of a model behind the application of `nnfront serve`, and the other ranks of a copy that is divided."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

import ray
import ray.serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.elastic.utils.distributed import get_free_port

from nnfront.cli import serve
from nnfront.distributed.ranks import Ranks, end_with, joined
from nnfront.errors import RunError

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def deployment(args: argparse.Namespace, options: Mapping[str, Any]) -> Any:
    """The application that `ray.serve.run` takes: replicas of what the flags say."""
    replica = ray.serve.deployment(ray.serve.ingress()(Replica), **options)
    return replica.bind(args, os.getcwd())


class Replica:
    """One copy of the model; rank 0 of it, if it is divided."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        """folder: that the flags' relative paths are in. Raises what loading raises."""
        self._other_ranks: list[Any] = []  # they end with whoever holds them
        if args.gang > 1:
            self._start_ranks(args, folder)
        else:
            _work_in(folder)
        self._engine, self._app = serve.application(args, *serve.loaded(args))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """What Ray asks for the application by."""
        return self._app

    def check_health(self) -> None:
        """What Ray asks now and then, to replace a replica that raises."""
        if not self._engine.is_alive:
            raise RunError("the engine has ended")

    def _start_ranks(self, args: argparse.Namespace, folder: str) -> None:
        group = ray.util.get_current_placement_group()
        needs = group.bundle_specs[0]
        for bundle in range(1, args.gang):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            follower = ray.remote(Follower).options(
                num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0), scheduling_strategy=place
            )
            self._other_ranks.append(follower.remote())
        ray.get([each.is_there.remote() for each in self._other_ranks])  # before this one waits for them
        port = get_free_port()  # type: ignore[no-untyped-call]
        for rank, each in enumerate(self._other_ranks, 1):
            each.follow.remote(args, folder, rank, port)
        self._membership = _as_rank(args, folder, 0, port)
        args.ranks = self._membership.__enter__()


class Follower:
    """Another rank of a replica, in the next bundle of its placement group."""

    def is_there(self) -> bool:
        """Whether its process runs."""
        return True

    def follow(self, args: argparse.Namespace, folder: str, rank: int, port: int) -> None:
        """Compute what rank 0 says until it ends. An error ends the process."""
        try:
            with _as_rank(args, folder, rank, port) as args.ranks:
                serve.engine_parts().compute_of(*serve.loaded(args)).follow()
        except Exception as error:
            end_with(error)


def _as_rank(args: argparse.Namespace, folder: str, rank: int, port: int) -> AbstractContextManager[Ranks]:
    """Join the ranks of a replica, at a port of this machine."""
    _work_in(folder)
    # Ray shows each process the GPUs of its bundle alone, so that the first is its own.
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(args.gang),
    }
    return joined(args.device or "cpu")


def _work_in(folder: str) -> None:
    with suppress(OSError):  # another machine may have only what the flags name by whole paths
        os.chdir(folder)
