# SPDX-License-Identifier: Apache-2.0
"""Turn a checkpoint into another file in one of three ways: `transform_files.py SOURCE TARGET ours|copy|naive`.

ours:  nnfront's transform, streaming, which fuses QKV and gate/up
copy:  the bytes of the file as they are, read and written in blocks of 16 MB
naive: safetensors.torch.load_file, torch.cat, safetensors.torch.save_file

Prints seconds until all is written, until it is on disk, and the most memory of its own that the process had meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

BLOCK_BYTES = 16 << 20


def copy(source: Path, target: Path) -> Callable[[], None]:
    """Prepare a copy."""
    buffer = memoryview(bytearray(BLOCK_BYTES))

    def run() -> None:
        with (
            open(source / "model.safetensors", "rb", buffering=0) as read,
            open(target / "copy", "wb", buffering=0) as write,
        ):
            os.posix_fallocate(write.fileno(), 0, os.fstat(read.fileno()).st_size)  # as ours does
            while size := read.readinto(buffer):
                write.write(buffer[:size])
            os.fsync(write.fileno())

    return run


def naive(source: Path, target: Path) -> Callable[[], None]:
    """Prepare what one writes in ten lines."""
    from safetensors.torch import load_file, save_file

    def run() -> None:
        weights = load_file(source / "model.safetensors")
        layers = {name.rsplit(".", 3)[0] for name in weights if name.endswith(".q_proj.weight")}
        for layer in sorted(layers):
            for path, parts, fused in (
                ("self_attn", "qkv", "qkv_proj"),
                ("mlp", ("gate", "up"), "gate_up_proj"),
            ):
                names = [f"{layer}.{path}.{part}_proj.weight" for part in parts]
                weights[f"{layer}.{path}.{fused}.weight"] = torch.cat([weights.pop(name) for name in names])
        save_file(weights, target / "fused.safetensors")
        with open(target / "fused.safetensors", "rb") as file:
            os.fsync(file.fileno())

    return run


def ours(source: Path, target: Path) -> Callable[[], None]:
    """Prepare a transform: the program is compiled, the checkpoint checked."""
    from nnfront.artefact.save import result_types
    from nnfront.llm.hf_folder import compile_folder
    from nnfront.transform.run import stream_transform, weight_dims
    from nnfront.transform.weight_usage import weight_uses
    from nnfront.weights import BoundWeights, check_weights, write_tensors

    model = compile_folder(source)
    program = model.executable.program
    (transform,) = program.transforms.values()
    found = check_weights(weight_uses(program).wanted, model.checkpoint.infos, aliases=program.aliases)
    weights = BoundWeights(model.checkpoint, found)

    def run() -> None:
        types = result_types(transform, weight_dims(transform, weights))
        write_tensors(target, "fused", types, stream_transform(transform, weights))

    return run


def anonymous_bytes() -> int:
    """Memory of this process that is no page of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


def main() -> None:
    """Run one way and print what it took."""
    source, target, way = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(2)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    run = {"copy": copy, "naive": naive, "ours": ours}[way](source, target)
    done, before = threading.Event(), anonymous_bytes()
    peak = before

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    shutil.rmtree(target)
    print(json.dumps({"seconds": seconds, "peak_bytes": peak - before}))


if __name__ == "__main__":
    main()
