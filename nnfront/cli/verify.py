# SPDX-License-Identifier: Apache-2.0
"""Compare the model with transformers' on the same folder and tokens, module by module; say where it diverges first, and why."""

from __future__ import annotations

import argparse
import sys

import nnfront as nn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        metavar="ID",
        help="the tokens to compare on; by default some from all over the vocabulary",
    )
    parser.add_argument(
        "--device", default="cpu", metavar="TARGET", help="what the compiled model runs on; default cpu"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command: exit code 0 if both agree, 1 if not."""
    found = nn.verify(args.path, args.model, args.tokens, ignored=args.ignore, device=args.device)
    sys.stdout.write(str(found))
    return 0 if found.fault is None else 1
