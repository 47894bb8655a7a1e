# SPDX-License-Identifier: Apache-2.0
"""Show the IR of a folder's model: a summary, with the compiled kernels of an artefact, the text of one method, or a page. Reads no weights."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

import nnfront as nn
from nnfront.cli import loading
from nnfront.cli.sizes import read_sizes
from nnfront.cli.text_file import write_text
from nnfront.errors import RunError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--html", metavar="FILE", help="write a page that shows all there is to see; - writes it to stdout"
    )
    parser.add_argument(
        "--device",
        metavar="TARGET",
        help="whose kernels the page shows; default cpu, an artefact has its own",
    )
    parser.add_argument(
        "--sizes",
        action="append",
        default=[],
        metavar="DIM=N",
        help="a number for a dim of the page, such as max_seq=4096; may be given for several dims",
    )
    parser.add_argument("--method", metavar="NAME", help="the text of this method instead of the summary")
    parser.add_argument(
        "--lifted", action="store_true", help="after the weight formulas were lifted into a transform"
    )
    parser.add_argument(
        "--provenance", action="store_true", help="say in a comment where each binding comes from"
    )


def main(args: argparse.Namespace) -> int:
    loading.refuse_for_artefact(args)
    if args.html is not None:
        loading.refuse(
            args,
            ("method", "lifted", "provenance"),
            "a page shows all methods, lifted, and where they come from",
        )
        return _page(args)
    loading.refuse(
        args, ("device",), "a page alone shows kernels", "add --html FILE, or ask nnfront explain DIR"
    )
    if args.method is None:
        loading.refuse(args, ("provenance",), "a summary shows no bindings", "add --method NAME")
    if args.sizes:
        raise RunError(
            "numbers for dims are for a page",
            help="add --html FILE, or ask nnfront explain DIR decode batch=1",
        )
    is_lifted = nn.artefact.is_artefact(args.path)
    if is_lifted:
        module = nn.artefact.program_of(args.path)
    else:
        module = nn.export_folder(args.path, args.model, methods=nn.Methods.of(extends=args.lifted))
    if args.lifted and not is_lifted:
        module = nn.passes.lift_transform_params(module, shared_transform=True)
    if args.method is None:
        sys.stdout.write(module.summary() + "\n")
        if is_lifted and (kernels := nn.artefact.kernels_of(args.path)) is not None:
            sys.stdout.write(f"\n{kernels}\n")
        return 0
    if args.method not in module:
        raise RunError(f"there is no method {args.method!r}", details=[f"there are {', '.join(module)}"])
    sys.stdout.write(module[args.method].text(provenance=args.provenance) + "\n")
    return 0


def _page(args: argparse.Namespace) -> int:
    methods, sizes = read_sizes(args.sizes)
    if methods:
        raise RunError(f"{methods[0]} gives no number for a dim", help="write the dim and its size: batch=1")
    page = nn.page(args.path, target=args.device, model_file=args.model, sizes=sizes)
    if args.html == "-":
        sys.stdout.write(page)
        return 0
    with suppress(OSError):  # which writing says
        Path(args.html).parent.mkdir(parents=True, exist_ok=True)
    write_text(args.html, page)
    print(f"{args.html}: {len(page.encode()) / 1e6:.2f} MB, opens in any browser", file=sys.stderr)
    return 0
