# SPDX-License-Identifier: Apache-2.0
"""A command as one of several ranks: rank 0 speaks for all, and each leaves its error for the launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from nnfront.distributed.ranks import end_with, joined
from nnfront.errors import LoadError


def run_as_rank(command: Callable[[argparse.Namespace], int], args: argparse.Namespace, started: int) -> int:
    """Run a command among the ranks that this process was started with. An error ends the process."""
    try:
        if not hasattr(args, "tp"):
            raise LoadError(f"nnfront {args.command} runs in one process, and {started} were started")
        if args.tp not in (None, started):
            raise LoadError(
                f"--tp is {args.tp}, but {started} processes were started",
                help="leave --tp out under torchrun",
            )
        with joined(args.device or "cpu") as ranks:
            args.ranks, args.tp = ranks, started
            if not ranks.is_first:
                sys.stdout = sys.stderr = open(os.devnull, "w")
            return command(args)
    except Exception as error:  # of ours or not: the launcher says it
        end_with(error)
