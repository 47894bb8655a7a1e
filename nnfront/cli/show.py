# SPDX-License-Identifier: Apache-2.0
"""Show the IR of a folder's model: a summary, with the compiled kernels of an artefact, or the text of one method. Reads no weights."""

from __future__ import annotations

import argparse
import sys

import nnfront as nn
from nnfront.errors import RunError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--method", metavar="NAME", help="the text of this method instead of the summary")
    parser.add_argument(
        "--lifted", action="store_true", help="after the weight formulas were lifted into a transform"
    )
    parser.add_argument(
        "--provenance", action="store_true", help="say in a comment where each binding comes from"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    is_lifted = nn.artefact.is_artefact(args.path)
    module = nn.artefact.program_of(args.path) if is_lifted else nn.export_folder(args.path, args.model)
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
