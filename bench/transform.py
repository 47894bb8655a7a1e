# SPDX-License-Identifier: Apache-2.0
"""A weight transform into files against copying the same bytes and against a script that loads, concatenates and saves; and `check`.

    python bench/transform.py FOLDER [--target FOLDER] [--rounds 5]

FOLDER holds the 1B-parameter bf16 checkpoint of `bench/checkpoints.py` (it is written if absent): QKV and gate/up are fused, nothing else.
Every run is a process of its own, the three alternate, the source is in the page cache, each ends with fsync. `check` reads the headers of a
70B checkpoint in 100 shards without data, whole command and alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoints import write
from machine import describe, keep, measure, table
from nnfront_models import llama

import nnfront as nn

PEERS = Path(__file__).parent / "peers"
WAYS = ("copy", "naive", "ours")
SHARDS = 100
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


def transform_rows(source: Path, target: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure the three ways, one after the other, and compare medians."""
    size = (source / "model.safetensors").stat().st_size
    script = PEERS / "transform_files.py"
    measure(script, source, target, "copy")  # fills the page cache
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            found[way].append(measure(script, source, target, way))
    seconds = {way: statistics.median(r["seconds"] for r in runs) for way, runs in found.items()}
    for way, runs in found.items():
        yield {
            "what": f"{way} of {source.name}",
            "seconds": seconds[way],
            "fastest": min(r["seconds"] for r in runs),
            "GB/s": size / seconds[way] / 1e9,
            "speed / copy": seconds["copy"] / seconds[way],
            "speed / naive": seconds["naive"] / seconds[way],
            "own memory MB": max(r["peak_bytes"] for r in runs) / 1e6,
        }


def write_headers(folder: Path) -> None:
    """Write a 70B checkpoint without its data: headers in shards, an index, config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [
        (n, [int(s) for s in p.shape])
        for n, p in llama.build(llama.Config.from_hf(LLAMA_70B)).named_parameters()
    ]
    index = {}
    for shard in range(SHARDS):
        file, entries, offset = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors", {}, 0
        for name, shape in names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]:
            end = offset + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
            index[name], offset = file, end
        header = json.dumps(entries).encode()
        (folder / file).write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))


def check_rows(folder: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure `nnfront check` as a command, and the check alone."""
    write_headers(folder)
    command, alone = [], []
    executable = nn.compile(nn.passes.lift_transform_params(nn.export_folder(folder), shared_transform=True))
    for _ in range(rounds):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "nnfront.cli", "check", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        command.append(time.perf_counter() - start)
        assert "fits: every weight has its tensor" in done.stdout, done.stdout + done.stderr
        start = time.perf_counter()
        report = executable.check(nn.Checkpoint(folder, headers_only=True))
        alone.append(time.perf_counter() - start)
        assert report.fits
    for what, times in (
        ("nnfront check, 70B in 100 shards, whole command", command),
        ("the check alone", alone),
    ):
        yield {"what": what, "seconds": statistics.median(times), "fastest": min(times)}


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", type=Path, help="where to write; FOLDER by default")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    source = write("llama-3.2-1b", args.folder)
    target = (args.target or args.folder) / "transformed"
    rows = [
        *transform_rows(source, target, args.rounds),
        *check_rows(args.folder / "headers-70b", args.rounds),
    ]
    print(keep("transform", describe("torch", "safetensors"), rows))
    print(table(rows))


if __name__ == "__main__":
    main()
