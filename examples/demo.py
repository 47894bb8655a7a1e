# SPDX-License-Identifier: Apache-2.0
"""The whole path in half a minute: export the shipped checkpoint, look at the IR, transform the weights, generate text."""

from __future__ import annotations

import argparse
from pathlib import Path

import nnfront as nn

HERE = Path(__file__).resolve().parent
PROMPT = "def binary_search(items, target):\n"


def main() -> None:
    """Print each step of the path and what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE / "checkpoints" / "pylib-3m")
    parser.add_argument("-p", "--prompt", default=PROMPT)
    args = parser.parse_args()

    title("1. The model's methods as IR")
    module = nn.export_folder(args.folder)
    print(module.summary())

    title("2. One method")
    print(module["decode"])

    title("3. What the weight transform does")
    lifted = nn.passes.lift_transform_params(module, shared_transform=True)
    print(lifted["transform_params"])

    title("4. Text")
    llm = nn.LLM.load(args.folder)
    print(args.prompt, end="", flush=True)
    for piece in llm.generate(
        args.prompt, max_new_tokens=96, temperature=0.7, top_p=0.9, seed=0, stream=True
    ):
        print(piece, end="", flush=True)
    print()

    title("5. Times")
    print(llm.phases.table())


def title(text: str) -> None:
    """Print a heading."""
    print(f"\n== {text} ==\n", flush=True)


if __name__ == "__main__":
    main()
