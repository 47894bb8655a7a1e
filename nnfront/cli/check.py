# SPDX-License-Identifier: Apache-2.0
"""Say what the model makes of each tensor of a checkpoint, and what does not fit. Reads headers only, so the data may be absent."""

from __future__ import annotations

import argparse
import json
import sys

import nnfront as nn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON, every tensor on its own"
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="a tensor, or pattern, that may be left over",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command: exit code 0 if the checkpoint fits, 1 if not."""
    module = nn.passes.lift_transform_params(nn.export_folder(args.path, args.model), shared_transform=True)
    checkpoint = nn.Checkpoint(args.path, headers_only=True)
    report = nn.compile(module).check(checkpoint, ignored=args.ignore)
    sys.stdout.write((json.dumps(report.json(), indent=1) if args.json else report.text()) + "\n")
    return 0 if report.fits else 1
