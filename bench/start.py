# SPDX-License-Identifier: Apache-2.0
"""From a fresh process to the first token of an artefact that is in the page cache: seconds of each step, least of several processes.

    python bench/start.py ARTEFACT [--runs 5]

`cpu s` counts all threads; a busy machine makes the other column longer, not that one. What is read of the weights for the first token is in
`first token`. Bytecode must have been written: without it every process compiles the sources anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from machine import describe, keep, measure, table

PEER = Path(__file__).parent / "peers" / "nnfront_start.py"


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artefact", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    measure(PEER, args.artefact)  # brings files into the page cache, and writes bytecode
    runs = [measure(PEER, args.artefact) for _ in range(args.runs)]
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "s": min(run[step]["s"] for run in runs),
            "cpu s": min(run[step]["cpu_s"] for run in runs),
        }
        for step in runs[0]
    ]
    ours = [row for row in rows if row["step"] not in ("import torch", "the same once more")]
    rows.append(
        {"step": "beside torch's import", **{key: sum(row[key] for row in ours) for key in ("s", "cpu s")}}
    )
    print(keep("start", describe("torch"), rows))
    print(table(rows))


if __name__ == "__main__":
    main()
