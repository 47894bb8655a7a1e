# SPDX-License-Identifier: Apache-2.0
"""Say what runs: for each instruction its kernel, bytes, flops and why that kernel; with --profile how long it takes here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping

from nnfront.cli import loading
from nnfront.cli.sizes import read_sizes
from nnfront.cli.text_file import write_text
from nnfront.errors import RunError, nearest

FILLED = 3
"""Tokens in a cache before a profiled call, if not told."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="*",
        metavar="METHOD|DIM=N",
        help="a method, and numbers for dims: decode batch=1 max_seq=512",
    )
    parser.add_argument(
        "--profile", action="store_true", help="load the weights and measure each instruction of the method"
    )
    parser.add_argument(
        "--filled",
        type=int,
        metavar="N",
        help="tokens in caches before the profiled call, random ones; default 3",
    )
    parser.add_argument("--trace", metavar="FILE", help="write the measured times as a Chrome trace")
    loading.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    methods, sizes = read_sizes(args.what)
    if args.trace is not None and not args.profile:
        raise RunError(
            "--trace without --profile has nothing to write",
            help="nnfront explain DIR METHOD --profile --trace FILE",
        )
    if not args.profile:
        loading.refuse(args, ("filled",), "nothing is called", "add --profile")
        executable = loading.compiled(args)
        for name in methods:
            _check(name, executable.program.methods)
        tables = [executable.explain(name, **sizes) for name in methods] or [executable.explain(**sizes)]
        sys.stdout.write("".join(tables))
        return 0
    loading.refuse(
        args, ("kv_quant",), "profiled calls are given caches that keep keys and values as they are"
    )
    session = loading.load(args).session
    if len(methods) != 1:
        raise RunError("--profile measures one method", details=[f"methods are {', '.join(session)}"])
    drawn = session.random_arguments(
        methods[0], filled=FILLED if args.filled is None else args.filled, **sizes
    )
    profile = session.profile(methods[0], *drawn)
    sys.stdout.write(str(profile))
    if args.trace is not None:
        write_text(args.trace, json.dumps(profile.trace()))
    return 0


def _check(name: str, methods: Mapping[str, object]) -> None:
    if name not in methods:
        raise RunError(
            f"there is no method {name!r}",
            details=[f"there are {', '.join(methods)}"],
            help=nearest(name, methods),
        )
