# SPDX-License-Identifier: Apache-2.0
"""Measure how fast the model reads prompts (prefill) and writes (decode), over lengths of prompts and numbers of sequences at once."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import nnfront as nn
from nnfront.cli import loading
from nnfront.cli.plot import Panel, plot
from nnfront.cli.text_file import write_text
from nnfront.errors import RunError

LENGTHS = (32, 128, 512, 2048)
BATCHES = (1, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=_numbers, metavar="N,N", help=f"tokens of prompts; default those of {_text(LENGTHS)} that fit"
    )  # fmt: skip
    parser.add_argument(
        "--batches", type=_numbers, default=BATCHES, metavar="N,N", help=f"sequences at once; default {_text(BATCHES)}"
    )  # fmt: skip
    parser.add_argument(
        "-n", "--max-new-tokens", type=int, default=32, metavar="N", help="steps of decode; default 32"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="runs whose median counts; default 3"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of it, too, as SVG")
    loading.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    new, repeats = args.max_new_tokens, args.repeats
    if new < 2 or repeats < 1:
        raise RunError(
            "there is nothing to measure",
            details=[f"{new} new tokens in {repeats} runs, expected 2 or more in 1 or more"],
        )
    llm = loading.load(args)
    lengths = args.lengths or [length for length in LENGTHS if length + new <= llm.context]
    if not lengths or max(lengths) + new > llm.context:
        raise RunError(
            "the prompts do not fit",
            details=[
                f"{max(lengths, default=min(LENGTHS))} tokens and {new} new ones, the context holds {llm.context}"
            ],
            help="give shorter --lengths, or fewer --max-new-tokens",
        )
    found = []
    if not args.json:
        sys.stdout.write(
            f"{'prompt':>8}{'batch':>7}{'prefill ms':>12}{'tokens/s':>10}{'decode ms':>12}{'tokens/s':>10}\n"
        )
    for each in nn.measure_speed(llm, lengths, args.batches, new, repeats):
        found.append(each)
        if not args.json:
            sys.stdout.write(
                f"{each.prompt_tokens:>8}{each.batch:>7}{each.prefill_seconds * 1e3:>12.2f}{each.prefill_tokens_per_second:>10.1f}"
                f"{each.decode_seconds * 1e3:>12.2f}{each.decode_tokens_per_second:>10.1f}\n"
            )
            sys.stdout.flush()
    name, target = nn.model_name(args.path), llm.session.program.target
    if args.json:
        values = {"model": name, "target": target, "max_new_tokens": new, "repeats": repeats}
        sys.stdout.write(json.dumps({**values, "results": [asdict(each) for each in found]}, indent=1) + "\n")
    if args.plot is not None:
        _draw(found, f"{name} on {target}", args.plot)
    return 0


def _draw(found: list[nn.Speed], title: str, path: str) -> None:
    def lines(what: str) -> dict[str, list[tuple[float, float]]]:
        return {
            f"batch {batch}": [
                (each.prompt_tokens, getattr(each, what)) for each in found if each.batch == batch
            ]
            for batch in dict.fromkeys(each.batch for each in found)
        }

    panels = [
        Panel(f"{name}, tokens/s", lines(f"{name}_tokens_per_second")) for name in ("prefill", "decode")
    ]
    write_text(path, plot(title, "tokens of the prompt", panels))


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as {_text(LENGTHS)}")
    return [int(part) for part in parts]


def _text(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
