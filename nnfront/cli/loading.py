# SPDX-License-Identifier: Apache-2.0
"""How a command loads a language model: its flags, what it says before and after."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import nnfront as nn
from nnfront.cli.progress import progress_bar
from nnfront.cli.quant_arguments import add_quant_arguments, say, scheme

Loaded = TypeVar("Loaded")
WORTH_SAYING_BYTES = 64 << 20
"""A load that takes more memory than this says so before it begins."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that say how to load."""
    parser.add_argument(
        "--device",
        metavar="TARGET",
        help="cpu (the default), cuda, or a GPU's architecture such as cuda:sm_90; an artefact has its own",
    )
    parser.add_argument("--dtype", help="compute in this dtype instead of the checkpoint's")
    add_quant_arguments(parser)
    add_lora_argument(parser)
    parser.add_argument("--kv-quant", metavar="Q", help="keep keys and values in 8 bits: fp8")
    parser.add_argument(
        "--cache", metavar="CACHE", help="a folder that keeps what is computed of weights for the next run"
    )


def add_ranks_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the flag that divides a model among processes."""
    parser.add_argument(
        "--tp",
        type=int,
        metavar="N",
        help="divide the model among N processes of this machine, on N GPUs with --device cuda",
    )


def add_spec_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the flag that says how tokens are guessed."""
    parser.add_argument(
        "--spec",
        metavar="HOW",
        help="guess tokens, to compute several in one call; texts stay the same. ngram[:N]: what came after the last N tokens before comes again; draft:DIR: what a smaller model with the same tokens takes for likeliest",
    )


def add_lora_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the flag that names adapters."""
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="DIR[=WEIGHT]",
        help="merge a low-rank adapter in PEFT's layout into the weights; may be given several times",
    )


def compiled(args: argparse.Namespace) -> nn.Executable:
    """Compile what the flags say, without its weights."""
    if nn.artefact.is_artefact(args.path):
        return nn.compile(nn.artefact.program_of(args.path), _device(args))
    return nn.compile_folder(
        args.path, _device(args), args.dtype, args.model, quant=scheme(args), lora=args.lora
    ).executable


def _device(args: argparse.Namespace) -> str:
    made = nn.artefact.is_artefact(args.path)
    return args.device or (nn.artefact.target_of(args.path) if made else "cpu")


def load(args: argparse.Namespace) -> nn.LLM:
    """Load what the flags say; a report of quantising and what loading takes go to stderr."""
    gc.disable()  # what loading makes stays, and to look through all of it for garbage takes as long as some of its steps
    try:
        return _load(args)
    finally:
        gc.freeze()
        gc.enable()


def _load(args: argparse.Namespace) -> nn.LLM:
    device = _device(args)
    llm = nn.LLM.load(
        args.path,
        device,
        dtype=args.dtype,
        quant=scheme(args),
        kv_quant=args.kv_quant,
        model_file=args.model,
        cache=args.cache,
        ignored=args.ignore,
        lora=args.lora,
        ranks=getattr(args, "ranks", None),
        extends=getattr(args, "spec", None) is not None,
        plan=lambda plan: _say(args, plan),
        progress=progress_bar("weights", "B", scale=True)
        if nn.backend_of(device).uploads
        else progress_bar("weights", "step"),
    )
    if llm.stored is not None:
        print(llm.stored, file=sys.stderr)
    say(llm.quantized, args)
    return llm


def load_seq2seq(args: argparse.Namespace) -> nn.Seq2Seq:
    """Load the encoder-decoder that the flags say."""
    return _load_other(nn.Seq2Seq.load, args, "an encoder-decoder")


def load_embedder(args: argparse.Namespace) -> nn.Embedder:
    """Load the encoder that the flags say."""
    return _load_other(nn.Embedder.load, args, "an encoder")


def _load_other(load: Callable[..., Loaded], args: argparse.Namespace, what: str) -> Loaded:
    for flag in ("lora", "kv_quant", "cache", "tp"):
        if getattr(args, flag, None):
            raise nn.errors.LoadError(
                f"--{flag.replace('_', '-')} is for language models, and {args.path} holds {what}"
            )
    return load(
        args.path,
        args.device or "cpu",
        args.dtype,
        scheme(args),
        model_file=args.model,
        ignored=args.ignore,
        progress=progress_bar("weights", "step"),
    )


def _say(args: argparse.Namespace, plan: Any) -> None:
    peak_bytes = plan.peak_bytes if args.cache else plan.peak_kept_bytes
    if peak_bytes >= WORTH_SAYING_BYTES:
        print(
            f"loading takes at most {peak_bytes / 1e6:.1f} MB of memory besides mapped files", file=sys.stderr
        )
    if ranks := getattr(args, "ranks", None):
        print(
            f"rank {ranks.rank} reads {plan.read_bytes / 1e6:.1f} MB of weights", file=sys.stderr, flush=True
        )
