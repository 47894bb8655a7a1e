# SPDX-License-Identifier: Apache-2.0
"""Continue a prompt: the text streams to stdout, a table of times follows on stderr."""

from __future__ import annotations

import argparse
import sys

import nnfront as nn
from nnfront.cli.progress import progress_bar
from nnfront.quant_format import FORMATS

WORTH_SAYING_BYTES = 64 << 20
"""A load that takes more memory than this says so before it begins."""


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
    parser.add_argument(
        "--device",
        metavar="TARGET",
        help="cpu (the default), cuda, or a GPU's architecture such as cuda:sm_90; an artefact has its own",
    )
    parser.add_argument("--dtype", help="compute in this dtype instead of the checkpoint's")
    parser.add_argument(
        "--quant", metavar="Q", help=f"store the weights of linear layers in {', '.join(FORMATS)}"
    )
    parser.add_argument("--kv-quant", metavar="Q", help="keep keys and values in 8 bits: fp8")
    parser.add_argument(
        "--cache", metavar="CACHE", help="a folder that keeps what is computed of weights for the next run"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    made = nn.artefact.is_artefact(args.path)
    device = args.device or (nn.artefact.target_of(args.path) if made else "cpu")
    llm = nn.LLM.load(
        args.path,
        device,
        dtype=args.dtype,
        quant=args.quant,
        kv_quant=args.kv_quant,
        model_file=args.model,
        cache=args.cache,
        ignored=args.ignore,
        plan=lambda plan: _say(plan.peak_bytes if args.cache else plan.peak_kept_bytes),
        progress=progress_bar("weights", "B", scale=True)
        if nn.backend_of(device).uploads
        else progress_bar("weights", "step"),
    )
    if llm.quantized is not None:
        print(llm.quantized, file=sys.stderr)
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


def _say(peak_bytes: int) -> None:
    if peak_bytes >= WORTH_SAYING_BYTES:
        print(
            f"loading takes at most {peak_bytes / 1e6:.1f} MB of memory besides mapped files", file=sys.stderr
        )
