# SPDX-License-Identifier: Apache-2.0
"""Continue a prompt, or write about a text or a sound if the model is an encoder-decoder: the text streams to stdout, a table of times follows on stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import fields

import nnfront as nn
from nnfront.cli import loading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "-p", "--prompt", help="the text to continue, or to write about; - reads it from stdin"
    )
    given.add_argument("--audio", metavar="FILE", help="a WAV file to write about, for models that hear")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="an image of the prompt, in their order"
    )
    parser.add_argument(
        "--language", metavar="L", help="the language of the sound; by default the likeliest one"
    )
    parser.add_argument("--task", metavar="T", help="what to do with the sound; default transcribe")
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
    loading.add_ranks_argument(parser)
    loading.add_spec_argument(parser)
    loading.add_adapter_arguments(parser)
    loading.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from nnfront.engine.params import Sampling  # here: `--help` does without numpy

    names = ["max_new_tokens", "stop", *(each.name for each in fields(Sampling))]
    how = {name: getattr(args, name) for name in names}
    kind = nn.kind_of_model(args.path, args.model)
    if kind == "Seq2Seq":
        loading.refuse(args, ("image",), f"{args.path} holds an encoder-decoder, which sees no images")
        writer = loading.load_seq2seq(args)
        if not writer.start.languages:
            loading.refuse(args, ("language",), f"{args.path} holds a model that knows of no languages")
        prompt = _read(args)
        heard = (
            {} if args.audio is None else dict(zip(("source", "rate"), nn.read_wav(args.audio), strict=True))
        )
        _write(
            writer.generate(
                **{"source": prompt, **heard}, language=args.language, task=args.task, stream=True, **how
            )
        )
        print(f"\n{writer.phases.table()}", file=sys.stderr)
        return 0
    if args.audio is not None:
        raise nn.errors.LoadError(
            f"{args.path} holds a model that hears nothing", help="give a prompt: -p TEXT"
        )
    loading.refuse(args, ("language", "task"), f"{args.path} holds a model that hears nothing")
    sees = kind == "VisionLanguageModel"
    if args.image and not sees:
        raise nn.errors.LoadError(f"{args.path} holds a model that sees no images")
    if sees:
        loading.refuse(
            args, ("spec", "lora_modules", "adapter"), f"{args.path} holds a model that sees images"
        )
    if args.image:
        loading.refuse_ranks(args, "one that is to see images")
    if not args.adapter:
        loading.refuse(args, ("lora_modules",), "no --adapter says which of them writes the text")
    llm = loading.load(args)
    prompt = _read(args)
    pieces = (
        nn.VisionLanguageModel(llm).generate(prompt, args.image, stream=True, **how)
        if sees
        else llm.generate(prompt, stream=True, spec=args.spec, adapter=args.adapter, **how)
    )
    sys.stdout.write(prompt)
    _write(pieces)
    print(f"\n{llm.phases.table()}", file=sys.stderr)
    return 0


def _read(args: argparse.Namespace) -> str:
    """The prompt; of several ranks one reads it for all."""
    prompt: str = args.prompt
    if prompt != "-":
        return prompt
    ranks = getattr(args, "ranks", None)
    if ranks is None:
        return sys.stdin.read()
    return str(ranks.from_first(sys.stdin.read() if ranks.is_first else ""))


def _write(pieces: Iterable[str]) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
