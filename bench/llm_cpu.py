# SPDX-License-Identifier: Apache-2.0
"""Prefill, decode, memory and start of language models on a CPU, against transformers and the machine's limits in the same run.

    python bench/llm_cpu.py FOLDER [--names llama-3.2-1b qwen2.5-0.5b]

FOLDER holds the checkpoints that `bench/checkpoints.py` writes (they are written if absent). Two threads, bf16, batch 1, a prompt of 512
tokens, 64 new ones. Each measurement runs in a process of its own; ours and theirs alternate, medians over all.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from checkpoints import CONFIGS, write
from machine import describe, keep, measure, read_afresh, table

PEERS = Path(__file__).parent / "peers"


def weight_bytes(path: Path) -> int:
    """Bytes of all tensors: the file less its header."""
    with open(path / "model.safetensors", "rb") as file:
        return (path / "model.safetensors").stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--names", nargs="+", default=list(CONFIGS))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.names:
        path = write(name, args.folder)
        read_afresh(path / "model.safetensors")
        size = weight_bytes(path)
        ours, theirs, limits, starts = [], [], [], []
        for _ in range(args.rounds):
            limits.append(measure(PEERS / "limits.py", path / "model.safetensors"))
            theirs.append(measure(PEERS / "transformers_llm.py", path))
            ours.append(measure(PEERS / "nnfront_llm.py", path, "speed"))
            starts.append(measure(PEERS / "nnfront_llm.py", path, "start"))
        bandwidth = statistics.median(r["read_gb_s"] for r in limits)
        prefill, decode = median(ours, "prefill"), median(ours, "decode")
        allowed = median(starts, "import_torch_s") + median(limits, "file_s") + 1.5
        row = {
            "model": name,
            "weights MiB": size / 2**20,
            "memory GB/s": bandwidth,
            "prefill tok/s": prefill,
            "prefill / transformers": prefill / median(theirs, "prefill"),
            "decode tok/s": decode,
            "decode / transformers": decode / median(theirs, "decode"),
            "decode GB/s": decode * size / 1e9,
            "share of memory GB/s": median(ours, "decode_share"),
            "products alone GB/s": median(ours, "products_gb_s"),
            "share of products alone": decode * size / 1e9 / median(ours, "products_gb_s"),
            "peak MiB": max(r["peak_mib"] for r in ours),
            "peak - weights MiB": max(r["peak_mib"] for r in ours) - size / 2**20,
            "transformers peak MiB": max(r["peak_mib"] for r in theirs),
            "first token s": median(starts, "first_token_s"),
            "allowed s": allowed,
            "import torch s": median(starts, "import_torch_s"),
            "read file s": median(limits, "file_s"),
        }
        rows.append(row)
        print(json.dumps(row, indent=1), flush=True)
    print(keep("llm_cpu", describe("torch", "transformers"), rows))
    print(table(rows))


def median(results: list[dict[str, Any]], key: str) -> float:
    """The median over all runs; a run may hold several values."""
    values = [v for r in results for v in (r[key] if isinstance(r[key], list) else [r[key]])]
    return statistics.median(values)


if __name__ == "__main__":
    main()
