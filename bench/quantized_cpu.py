# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill of language models on a CPU with quantised weights, against bfloat16 in the same run.

    python bench/quantized_cpu.py FOLDER [--names llama-3.2-1b qwen2.5-0.5b] [--rounds 2]

FOLDER holds the checkpoints that `bench/checkpoints.py` writes (they are written if absent). Two threads, batch 1, a prompt of 512
tokens, 64 new ones. Each measurement runs in a process of its own; the schemes alternate, medians over all.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from checkpoints import CONFIGS, write
from llm_cpu import median
from machine import describe, keep, measure, table

PEER = Path(__file__).parent / "peers" / "nnfront_llm.py"
SCHEMES = ("bfloat16", "int8", "fp8", "int4")


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--names", nargs="+", default=list(CONFIGS))
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.names:
        path = write(name, args.folder)
        runs: dict[str, list[dict[str, Any]]] = {scheme: [] for scheme in SCHEMES}
        for _ in range(args.rounds):
            for scheme in SCHEMES:
                runs[scheme].append(measure(PEER, path, "speed", *([] if scheme == "bfloat16" else [scheme])))
        plain = median(runs["bfloat16"], "decode")
        for scheme, results in runs.items():
            decode = median(results, "decode")
            rows.append(
                {
                    "model": name,
                    "weights": scheme,
                    "weights MiB": results[0]["weights_mib"],
                    "decode tok/s": decode,
                    "decode / bfloat16": decode / plain,
                    "prefill tok/s": median(results, "prefill"),
                    "peak MiB": max(result["peak_mib"] for result in results),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    print(keep("quantized_cpu", describe("torch"), rows))
    print(table(rows))


if __name__ == "__main__":
    main()
