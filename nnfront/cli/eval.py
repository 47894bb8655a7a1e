# SPDX-License-Identifier: Apache-2.0
"""Say how well the model predicts a text: bits per byte and perplexity, with a window that slides over it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import nnfront as nn
from nnfront.cli import loading
from nnfront.cli.progress import progress_bar
from nnfront.cli.text_file import read_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text", required=True, metavar="FILE", help="a text in UTF-8; - reads it from stdin"
    )
    parser.add_argument(
        "--window", type=int, metavar="N", help="tokens seen at once; 1024 by default, or the context if less"
    )
    parser.add_argument(
        "--stride", type=int, metavar="N", help="how far the window moves; half of it by default"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    loading.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    text = read_text(args.text)
    llm = loading.load(args)
    found = nn.evaluate(llm, text, args.window, args.stride, progress_bar("text", "token"))
    if args.json:
        values = {**asdict(found), "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
        sys.stdout.write(json.dumps(values, indent=1) + "\n")
    else:
        sys.stdout.write(
            f"bits per byte  {found.bits_per_byte:.4f}\nperplexity     {found.perplexity:.4f}\n"
            f"{found.predicted:,} of {found.tokens:,} tokens predicted, {found.text_bytes:,} bytes;"
            f" window {found.window}, stride {found.stride}\n"
        )
    return 0
