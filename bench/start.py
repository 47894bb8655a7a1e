# SPDX-License-Identifier: Apache-2.0
"""From a fresh process to the first token of an artefact that is in the page cache: seconds of each step, least of several processes.

    python bench/start.py ARTEFACT [--runs 5]

`cpu s` counts all threads, `main s` the one that loads: weights are checked in others while it compiles. A busy machine makes the column `s` longer, and
the others where memory is what is waited for. What is read of the weights for the first token is in `first token`. The last rows are whole processes: `nnfront run`, and
Python that imports torch and nothing else, alternating. They write and read bytecode, as Python does by itself, whatever the environment says: without it every
process compiles the sources anew, 0.3 s.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe, keep, measure, read_afresh, table

PEER = Path(__file__).parent / "peers" / "nnfront_start.py"
NOT_OURS = ("import torch", "the same once more")


def whole(*arguments: str) -> dict[str, float]:
    """Run Python with these arguments; return seconds, and those of the processor."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "s": seconds,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artefact", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    for file in args.artefact.glob("*.safetensors"):
        read_afresh(file)
    command = ("-m", "nnfront", "run", str(args.artefact), "-p", "def main():", "-n", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    measure(PEER, args.artefact)  # writes bytecode
    whole(*command)
    runs: list[dict[str, Any]] = []
    for _ in range(args.runs):
        steps = measure(PEER, args.artefact)
        ours = [seconds for step, seconds in steps.items() if step not in NOT_OURS]
        steps["beside torch's import"] = {key: sum(each[key] for each in ours) for key in ours[0]}
        runs.append(steps)
        steps["nnfront run"], steps["python, import torch"] = whole(*command), whole("-c", "import torch")
    rows = [
        {
            "step": step,
            **{name.replace("_", " "): min(run[step][name] for run in runs) for name in runs[0][step]},
        }
        for step in runs[0]
    ]
    print(keep("start", describe("torch"), rows))
    print(table(rows))


if __name__ == "__main__":
    main()
