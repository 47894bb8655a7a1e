# SPDX-License-Identifier: Apache-2.0
"""Say what the model makes of each tensor of a checkpoint, and what does not fit; of an artefact, whether it is as it was written.

Of a checkpoint only headers are read, so the data may be absent (all of it: of a truncated file it is said); of an artefact all bytes are.
"""

from __future__ import annotations

import argparse
import json
import sys

import nnfront as nn
from nnfront.cli import loading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON, every tensor on its own"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command: exit code 0 if all fits, 1 if not."""
    loading.refuse_for_artefact(args)
    if nn.artefact.is_artefact(args.path):
        return _check_artefact(args)
    checkpoint = nn.Checkpoint(args.path, headers_only=True)
    exported = nn.export_folder(args.path, args.model, checkpoint)
    module = nn.passes.lift_transform_params(exported, shared_transform=True)
    report = nn.check(module, checkpoint, ignored=args.ignore)
    sys.stdout.write((json.dumps(report.json(), indent=1) if args.json else report.text()) + "\n")
    return 0 if report.fits and not checkpoint.truncated else 1


def _check_artefact(args: argparse.Namespace) -> int:
    problems = nn.artefact.check(args.path)
    if args.json:
        sys.stdout.write(json.dumps({"problems": problems}, indent=1) + "\n")
    elif problems:
        sys.stdout.write(f"{args.path} is not the artefact that was written\n")
        sys.stdout.writelines(f"  {line}\n" for problem in problems for line in problem.splitlines())
    else:
        sys.stdout.write(f"{args.path} is the artefact that was written, byte for byte, and loads\n")
    return 1 if problems else 0
