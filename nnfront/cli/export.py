# SPDX-License-Identifier: Apache-2.0
"""Make an artefact of a folder: the compiled program and its weights, which loads without the model file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nnfront as nn
from nnfront.cli.loading import add_lora_argument
from nnfront.cli.progress import progress_bar
from nnfront.cli.quant_arguments import add_quant_arguments, say, scheme
from nnfront.errors import LoadError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help="where to put it; an artefact there is replaced in one step",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="TARGET",
        help="cpu (the default), cuda, or a GPU's architecture, such as cuda:sm_90: its kernels are compiled here, no GPU is needed",
    )
    parser.add_argument(
        "--sizes",
        action="append",
        default=[],
        metavar="DIM=N,...",
        help="compile kernels for these sizes only, such as batch=1,8; may be given for several dims",
    )
    parser.add_argument(
        "--mtp",
        action="store_true",
        help="also the head that guesses further tokens, of a checkpoint that has one, for --spec mtp",
    )
    parser.add_argument(  # this process starts no ranks, so that it has no `tp` of its own
        "--tp", dest="ranks_to_be", type=int, default=1, metavar="N", help="divide the model among N ranks; run and serve load it with --tp N"
    )  # fmt: skip
    parser.add_argument("--dtype", help="compute in this dtype instead of the checkpoint's")
    add_quant_arguments(parser)
    add_lora_argument(parser)


def main(args: argparse.Namespace) -> int:
    bar = progress_bar("weights", "B", scale=True)
    phases = nn.artefact.export(
        args.path,
        args.output,
        target=args.device,
        sizes=_sizes(args.sizes),
        dtype=args.dtype,
        quant=scheme(args),
        model_file=args.model,
        ignored=args.ignore,
        lora=args.lora,
        mtp=args.mtp,
        ranks=args.ranks_to_be,
        progress=bar,
        compiled=progress_bar("kernels", "kernel"),
        plan=_say,
        quantized=lambda report: say(report, args),
    )
    size = sum(file.stat().st_size for file in Path(args.output).rglob("*") if file.is_file())
    _say(f"{args.output}: {size / 1e6:.1f} MB\n\n{phases.table()}")
    return 0


def _sizes(given: list[str]) -> dict[str, list[int]]:
    """The sizes of each dim that was given."""
    found: dict[str, list[int]] = {}
    for text in given:
        name, _, numbers = text.partition("=")
        if not name or not all(number.isdecimal() for number in numbers.split(",")):
            raise LoadError(
                f"--sizes {text} says no sizes", help="write the dim and its sizes: --sizes batch=1,8"
            )
        found.setdefault(name, []).extend(map(int, numbers.split(",")))
    return found


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
