# SPDX-License-Identifier: Apache-2.0
"""Start ranks by torchrun's own launcher, and say in one error what has ended them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnfront.errors import LoadError, NnfrontError, RunError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

THREADS = "OMP_NUM_THREADS"
SHUTDOWN_SECONDS = 2
"""How long ranks that are asked to end, because one has, may take before they are killed."""


def launch(ranks: int, arguments: Sequence[str]) -> None:
    """Run `python -m nnfront ARGUMENTS` in as many processes on this machine, which know their number by torchrun's variables; return when all are done, or when this process was asked to end.

    Raises RunError with what ended them: a rank that was killed, else the first error of one. No process is left behind.
    """
    if type(ranks) is not int or ranks < 1:
        raise LoadError(f"{ranks!r} ranks cannot be started", help="give a number of at least 1")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says is in the error
    os.environ.setdefault(THREADS, str(max(1, (os.cpu_count() or 1) // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "nnfront", *arguments)
    except ChildFailedError as error:
        raise _what_ended(error.failures) from None
    except SignalException as error:  # it has ended the ranks
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None


def _what_ended(failures: Mapping[int, ProcessFailure]) -> NnfrontError:
    """The error that a person wants to see: of a rank that was killed, else of one that others did not make fail."""
    said = {rank: _message(failure) for rank, failure in failures.items()}
    for kind, text in said.values():
        if kind == "HungRank":
            return RunError(text)
    has_error = any(kind not in ("", "LostRank") for kind, _ in said.values())
    for rank, failure in failures.items():
        # The launcher itself asks the others to end when one has failed.
        if failure.exitcode < 0 and not (has_error and failure.exitcode == -signal.SIGTERM):
            return RunError(
                f"rank {rank} was killed by {failure.signal_name()}",
                details=[f"process {failure.pid}"],
                help="a system without memory left ends processes so"
                if failure.exitcode == -signal.SIGKILL
                else "",
            )
    first = sorted(said, key=lambda rank: (said[rank][0] in ("", "LostRank"), rank))[0]
    kind, text = said[first]
    return RunError(text if kind else f"rank {first} ended with exit code {failures[first].exitcode}")


def _message(failure: ProcessFailure) -> tuple[str, str]:
    """The class and the text of the error that a rank has left; both empty if it left none."""
    message: Any = failure.message
    if not isinstance(message, dict):
        return "", ""
    kind, _, text = str(message["message"]).partition(": ")
    return kind, text
