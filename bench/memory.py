# SPDX-License-Identifier: Apache-2.0
"""What a prefill takes in memory against its plan: pages of a fresh process, and bytes that torch's allocator gave out.

    python bench/memory.py FOLDER [--name llama-3.2-1b] [--prompts 128 512 2048]

FOLDER holds the checkpoints that `bench/checkpoints.py` writes (they are written if absent). bf16, batch 1, two threads. Each prompt is
measured twice: with malloc as it is, and with a fixed threshold above which it takes pages from the system and gives them back
(MALLOC_MMAP_THRESHOLD_; by itself malloc raises its own, and keeps freed memory for later).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from checkpoints import CONFIGS, write
from machine import describe, keep, measure, table

SCRIPT = Path(__file__).parent / "peers" / "nnfront_memory.py"
THRESHOLD = 128 * 1024
MIB = 2**20


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", choices=CONFIGS, default="llama-3.2-1b")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048])
    args = parser.parse_args()
    path = write(args.name, args.folder)
    rows: list[dict[str, Any]] = []
    for prompt in args.prompts:
        default = measure(SCRIPT, path, prompt)
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(THRESHOLD)
        fixed = measure(SCRIPT, path, prompt)
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
        planned = fixed["planned"]
        rows.append(
            {
                "model": args.name,
                "prompt": prompt,
                "planned MiB": planned / MIB,
                "allocated MiB": fixed["allocated"] / MIB,
                "allocated / planned": fixed["allocated"] / planned,
                "pages MiB": fixed["rss"] / MIB,
                "pages / planned": fixed["rss"] / planned,
                "pages, malloc as it is, MiB": default["rss"] / MIB,
                "weights MiB": fixed["weights"] / MIB,
                "cache MiB": fixed["cache"] / MIB,
                "peak at": fixed["at"],
            }
        )
        print(table(rows[-1:]), flush=True)
    print(keep("memory", describe("torch"), rows))
    print(table(rows))


if __name__ == "__main__":
    main()
