# SPDX-License-Identifier: Apache-2.0
"""Say what changed between two folders or artefacts: dims, methods, formulas, weights by content, kernels; exit code 0 if nothing did.

Exit codes are those of diff: 0 the same, 1 different, 2 trouble.
"""

from __future__ import annotations

import argparse
import json
import sys

import nnfront as nn
from nnfront.cli import loading

TROUBLE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("other", metavar="OTHER", help="what it is compared with: what it has become")
    parser.add_argument(
        "--device", metavar="TARGET", help="whose kernels are compared; default cpu, an artefact has its own"
    )
    parser.add_argument("--json", action="store_true", help="print all changes as JSON")


def main(args: argparse.Namespace) -> int:
    """Run the command: exit code 0 if both are the same, 1 if not."""
    other = nn.find_model(args.other)
    if nn.artefact.is_artefact(args.path) and nn.artefact.is_artefact(other):
        loading.refuse_for_artefact(args)
    found = nn.diff(args.path, other, model_file=args.model, target=args.device)
    sys.stdout.write((json.dumps(found.json(), indent=1) if args.json else str(found)) + "\n")
    return 0 if found.is_same else 1
