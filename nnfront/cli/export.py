# SPDX-License-Identifier: Apache-2.0
"""Make an artefact of a folder: the compiled program and its weights, which loads without the model file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nnfront as nn
from nnfront.cli.bar import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help="where to put it; an artefact there is replaced in one step",
    )
    parser.add_argument("--dtype", help="compute in this dtype instead of the checkpoint's")
    parser.add_argument("--quant", metavar="Q", help="store the weights of linear layers in int4, int8 or fp8")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    bar = progress_bar("weights", "B", scale=True)
    phases = nn.artefact.export(
        args.path,
        args.output,
        dtype=args.dtype,
        quant=args.quant,
        model_file=args.model,
        progress=bar,
        plan=_say,
    )
    size = sum(file.stat().st_size for file in Path(args.output).iterdir())
    _say(f"{args.output}: {size / 1e6:.1f} MB\n\n{phases.table()}")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
