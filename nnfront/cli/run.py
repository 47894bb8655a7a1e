# SPDX-License-Identifier: Apache-2.0
"""Continue a prompt: the text streams to stdout, a table of times follows on stderr."""

from __future__ import annotations

import argparse
import sys

from nnfront.cli import loading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("-p", "--prompt", required=True, help="the text to continue; - reads it from stdin")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 takes the likeliest token; this and what follows are by default as generation_config.json says, without one 0",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the likeliest tokens that together reach P"
    )
    parser.add_argument(
        "--min-p", type=float, metavar="P", help="draw from tokens with at least P of the highest probability"
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="divide the logits of tokens that were there before by R; more than 1 repeats less",
    )
    parser.add_argument("--seed", type=int, help="the same seed draws the same text")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given several times"
    )
    loading.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    llm = loading.load(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    pieces = llm.generate(
        prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        repetition_penalty=args.repetition_penalty,
        stop=args.stop,
        stream=True,
    )
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    print(f"\n{llm.phases.table()}", file=sys.stderr)
    return 0
