# SPDX-License-Identifier: Apache-2.0
"""The command line: `nnfront COMMAND DIR`. One file for each command: `add_arguments` declares its flags, `main` runs it and returns the exit code.

Heavy packages load only when a command runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence

import nnfront as nn
from nnfront.cli import (
    bench,
    calibrate,
    chat,
    check,
    deploy,
    diff,
    eval,
    explain,
    export,
    run,
    serve,
    show,
    verify,
)
from nnfront.errors import NnfrontError

_FILES = bench, calibrate, chat, check, deploy, diff, eval, explain, export, run, serve, show, verify
COMMANDS = {file.__name__.rpartition(".")[2]: file for file in _FILES}

# Exit codes: 0 done, 1 an error of the user's or of the files (or what a command calls TROUBLE), 2 wrong arguments (argparse), 130 interrupted.
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors go to stderr."""
    parser = argparse.ArgumentParser(prog="nnfront", description="Run and inspect language models.")
    parser.add_argument("--version", action="version", version=f"nnfront {nn.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        about = (command.__doc__ or "").strip().splitlines()[0]
        sub = commands.add_parser(name, help=about, description=about)
        sub.add_argument(
            "path",
            metavar="DIR",
            help="a Hugging Face folder, an artefact, a safetensors or GGUF file, or org/name in Hugging Face's cache",
        )
        sub.add_argument(
            "--model", metavar="FILE", help="a model file, instead of the shipped one for the folder"
        )
        if command not in (diff, show):  # which hold weights against no model
            sub.add_argument(
                "--ignore",
                action="append",
                default=[],
                metavar="NAME",
                help="a tensor, or pattern, that may be left over in the checkpoint",
            )
        command.add_arguments(sub)
    args = parser.parse_args(argv)
    try:
        return _run(args, sys.argv[1:] if argv is None else argv)
    except NnfrontError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(getattr(COMMANDS[args.command], "TROUBLE", 1))
    except BrokenPipeError:  # whoever read our output has had enough
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run a command here, in ranks that are started for it, or as one of those."""
    started, asked = int(os.environ.get("WORLD_SIZE", "1")), getattr(args, "tp", None)
    if "RANK" in os.environ and started > 1:
        from nnfront.cli.ranks import run_as_rank

        return run_as_rank(_run_here, args, started)
    if asked == 1:
        args.tp = None
    elif asked is not None:
        from nnfront.distributed.launch import launch

        launch(asked, argv)
        return 0
    return _run_here(args)


def _run_here(args: argparse.Namespace) -> int:
    args.path = str(nn.find_model(args.path))
    _import_torch()
    code: int = COMMANDS[args.command].main(args)
    return code


def _import_torch() -> None:
    """Import torch and leave it out of what is looked through for garbage: it stays, and looking through it takes a tenth of the time of its import, again and again."""
    # Threads of torch that wait for each other spin first, by default for as long as several tokens take: where cores have other work as well,
    # a token then takes ten times as long. OpenMP reads this when it is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    gc.disable()
    import torch  # noqa: F401

    gc.freeze()
    gc.enable()
