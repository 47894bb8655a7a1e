# SPDX-License-Identifier: Apache-2.0
"""How a command loads a language model: its flags, what it says before and after."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import nnfront as nn
from nnfront.cli.progress import progress_bar
from nnfront.cli.quant_arguments import add_quant_arguments, say, scheme

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
        help="guess tokens, to compute several in one call; texts stay the same. ngram[:N]: what came after the last N tokens before comes again; draft:DIR: what a smaller model with the same tokens takes for likeliest; mtp[:N]: N tokens, by default one, by the head for it that some checkpoints have",
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


def add_adapters_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the flag that loads adapters beside the weights."""
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=DIR",
        help="load low-rank adapters in PEFT's layout beside the weights, for texts to be generated with one of them each",
    )


def add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that load adapters beside the weights, and choose one of them."""
    add_adapters_argument(parser)
    parser.add_argument(
        "--adapter", metavar="NAME", help="the adapter of --lora-modules that is used; by default none"
    )


def adapters_of(args: argparse.Namespace) -> dict[str, str]:
    """Folders of adapters by name. Raises LoadError for what is none, and for a name that two have."""
    found: dict[str, str] = {}
    for given in getattr(args, "lora_modules", []):
        name, _, folder = given.partition("=")
        if not name or not folder:
            raise nn.errors.LoadError(f"--lora-modules is {given!r}, expected NAME=DIR")
        if name in found:
            raise nn.errors.LoadError(
                f"--lora-modules gives the name {name!r} twice", help="give each adapter a name of its own"
            )
        found[name] = folder
    return found


def refuse(args: argparse.Namespace, flags: Sequence[str], why: str, help: str = "") -> None:
    """Raise LoadError if one of these flags was given, which would have no effect."""
    if given := [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag, None)]:
        raise nn.errors.LoadError(f"{' and '.join(given)} would change nothing: {why}", help=help)


def refuse_for_artefact(args: argparse.Namespace) -> None:
    """Raise LoadError for flags that say how an artefact is to be made, if there is one."""
    if nn.artefact.is_artefact(args.path):
        refuse(
            args,
            ("model", "dtype", "quant", "activations", "lora", "lora_modules", "cache", "ignore"),
            f"{args.path} is an artefact, whose model and weights are made already",
            "give the folder that it was made of",
        )


def compiled(args: argparse.Namespace) -> nn.Executable:
    """Compile what the flags say, without its weights."""
    refuse_for_artefact(args)
    refuse(args, ("kv_quant", "cache", "ignore"), "without --profile no weights and caches are made")
    if nn.artefact.is_artefact(args.path):
        return nn.compile(nn.artefact.program_of(args.path), _device(args))
    return nn.compile_folder(
        args.path, _device(args), args.dtype, args.model, quant=scheme(args), lora=args.lora
    ).executable


def _device(args: argparse.Namespace) -> str:
    made = nn.artefact.is_artefact(args.path)
    return args.device or (nn.artefact.target_of(args.path) if made else "cpu")


def load(args: argparse.Namespace, *, serves: bool = False) -> nn.LLM:
    """Load what the flags say, for an engine if it `serves`; a report of quantising and what loading takes go to stderr."""
    gc.disable()  # what loading makes stays, and to look through all of it for garbage takes as long as some of its steps
    ranks, how = getattr(args, "ranks", None), getattr(args, "spec", None)
    guesses = {"extends": serves or how is not None, "mtp": (how or "").partition(":")[0] == "mtp"}
    try:
        llm = nn.LLM.load(args.path, ranks=ranks, adapters=adapters_of(args), **guesses, **_options(args))
        return _told(llm, args)
    finally:
        gc.freeze()
        gc.enable()


def load_seq2seq(args: argparse.Namespace) -> nn.Seq2Seq:
    """Load the encoder-decoder that the flags say."""
    refuse_ranks(args, "an encoder-decoder")
    refuse(args, ("spec", "lora_modules", "adapter"), f"{args.path} holds an encoder-decoder")
    return _told(nn.Seq2Seq.load(args.path, **_options(args)), args)


def load_embedder(args: argparse.Namespace) -> nn.Embedder:
    """Load the encoder that the flags say."""
    refuse_ranks(args, "an encoder")
    refuse(args, ("lora", "lora_modules", "kv_quant", "cache", "spec"), f"{args.path} holds an encoder")
    options = _options(args)
    for name in ("kv_quant", "cache", "lora", "plan"):
        del options[name]
    return nn.Embedder.load(args.path, **options)


def refuse_ranks(args: argparse.Namespace, kind: str) -> None:
    """Raise LoadError where a model of a kind that one process computes was to be divided."""
    if getattr(args, "tp", None):
        raise nn.errors.LoadError(
            f"--tp divides language models that read texts alone, and {args.path} holds {kind}",
            help="leave --tp out",
        )


def _options(args: argparse.Namespace) -> dict[str, Any]:
    device = _device(args)
    return {
        "device": device,
        "dtype": args.dtype,
        "quant": scheme(args),
        "kv_quant": args.kv_quant,
        "model_file": args.model,
        "cache": args.cache,
        "ignored": args.ignore,
        "lora": args.lora,
        "plan": lambda plan: _say(args, plan),
        "progress": progress_bar("weights", "B", scale=True)
        if nn.backend_of(device).uploads
        else progress_bar("weights", "step"),
    }


Model = TypeVar("Model", "nn.LLM", "nn.Seq2Seq")


def _told(model: Model, args: argparse.Namespace) -> Model:
    """The model, after it was said what became of its weights."""
    if model.stored is not None:
        print(model.stored, file=sys.stderr)
    say(model.quantized, args)
    return model


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
