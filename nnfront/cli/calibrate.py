# SPDX-License-Identifier: Apache-2.0
"""Measure on some text what weights are multiplied with, for --calibration: quantised weights are then rounded by it."""

from __future__ import annotations

import argparse
import sys

import nnfront as nn
from nnfront.cli.progress import progress_bar
from nnfront.cli.text_file import read_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text", required=True, metavar="FILE", help="a text in UTF-8, like those that the model is for; - reads it from stdin"
    )  # fmt: skip
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help="the safetensors file to write, for --calibration",
    )
    parser.add_argument("--dtype", help="compute in this dtype instead of the checkpoint's")


def main(args: argparse.Namespace) -> int:
    tokens = nn.calibrate(
        args.path,
        read_text(args.text),
        args.output,
        dtype=args.dtype,
        model_file=args.model,
        ignored=args.ignore,
        progress=progress_bar("text", "token"),
    )
    sys.stdout.write(f"{args.output}: calibrated on {tokens:,} tokens\n")
    return 0
