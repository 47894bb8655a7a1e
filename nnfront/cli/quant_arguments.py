# SPDX-License-Identifier: Apache-2.0
"""The arguments that say what weights are stored in, of the commands that make weights."""

from __future__ import annotations

import argparse
import sys

import nnfront as nn
from nnfront.errors import LoadError
from nnfront.quant_format import FORMATS


def add_quant_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument(
        "--quant",
        metavar="Q",
        help=f"store weights in {', '.join(FORMATS)}; int4:64 has a scale for 64 neighbours, int4:channel for each output",
    )
    parser.add_argument(
        "--quant-head",
        metavar="Q",
        help="the head and the embedding; by default as others, with 8 bits at least",
    )
    parser.add_argument(
        "--quant-rule",
        action="append",
        default=[],
        dest="quant_rules",
        metavar="PATTERN=Q",
        help="the weights of these modules; the last rule that fits counts",
    )
    parser.add_argument(
        "--keep",
        action="append",
        dest="quant_rules",
        metavar="PATTERN",
        type=lambda pattern: f"{pattern}=keep",
        help="leave the weights of these modules as they are, such as '*.o_proj'",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="round weights by what they are multiplied with on some text: what nnfront calibrate DIR --text FILE -o OUT wrote",
    )
    parser.add_argument(
        "--activations",
        choices=("int8",),
        help="round what weights in integers, or in blocks of them, are multiplied with to 8 bits, each row by its largest element: prompts are read faster",
    )
    parser.add_argument("--quant-report", action="store_true", help="say what becomes of each weight")


def scheme(args: argparse.Namespace) -> nn.passes.QuantScheme | None:
    """Return what the arguments ask for. Raises LoadError for rules without a pattern or a format, or without `--quant`."""
    if args.quant is None:
        if args.quant_head or args.quant_rules or args.quant_report or args.calibration:
            raise LoadError(
                "it is said how weights are to be quantised, but not to what",
                help="add --quant int8, or leave it out",
            )
        return (
            None if args.activations is None else nn.passes.QuantScheme("keep", activations=args.activations)
        )
    rules = []
    for text in args.quant_rules:
        pattern, _, format = text.rpartition("=")
        if not pattern or not format:
            raise LoadError(
                f"--quant-rule {text} is no rule",
                help="write the modules and the format: --quant-rule '*.o_proj=int8'",
            )
        rules.append((pattern, format))
    return nn.passes.QuantScheme(
        args.quant, args.quant_head, tuple(rules), args.calibration, args.activations
    )


def say(report: nn.passes.QuantizeReport | None, args: argparse.Namespace) -> None:
    """Print what was done to weights, if anything was, to stderr: a line, or with `--quant-report` all of them."""
    if report is not None:
        print(report.text() if args.quant_report else report, file=sys.stderr)
