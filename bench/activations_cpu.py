# SPDX-License-Identifier: Apache-2.0
"""One product with weights in few bits, activations as they are and rounded to 8 bits, on what processors have: `python bench/activations_cpu.py [--rows 1 8 64 512]`.

9728 x 896 in bfloat16, one thread, the least processor time of five calls each, alternating, in a process for each set of instructions: kernels in C by NNFRONT_INSTRUCTIONS, torch's by
ONEDNN_MAX_CPU_ISA, matrix tiles (AMX) only where they are named, and there are. Sets that the processor does not run are left out. Billions of operations a second for a core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from machine import describe, keep, table

OUTPUTS, INPUTS = 9728, 896
CALLS = 5
# What is there: kernels in C, whether with tiles, and torch's.
SETS = {
    "AMX": ("avx512_bf16", True, "DEFAULT"),
    "AVX512_BF16, VNNI": ("avx512_bf16", False, "AVX512_CORE_BF16"),
    "AVX512, VNNI": ("avx512_vnni", False, "AVX512_CORE_VNNI"),
    "AVX512": ("avx512", False, "AVX512_CORE"),
    "AVX2, VNNI": ("avx2_vnni", False, "AVX2_VNNI"),
    "AVX2": ("avx2", False, "AVX2"),
}
WAYS = ("bfloat16", "int8", "int8 x int8", "int8:128", "int8:128 x int8", "int4", "int4 x int8")


def one(rows: list[int], has_tiles: bool) -> None:
    """Measure in this process, and print a JSON object for each number of rows."""
    import torch

    import nnfront as nn
    from nnfront import spec
    from nnfront.backends.cpu import linear, quantized_gemv, quantized_linear

    class Product(nn.Module):
        def __init__(self) -> None:
            self.up = nn.Linear(INPUTS, OUTPUTS, bias=False)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.up(x)

    torch.set_num_threads(1)
    linear.TILES = quantized_gemv.TILES = quantized_linear.TILES = has_tiles
    model = Product()
    model.to("bfloat16")
    plain = model.export({"forward": {"x": spec.Tensor(["n", INPUTS], "bfloat16")}})
    weights = {"up.weight": torch.randn(OUTPUTS, INPUTS).bfloat16()}
    sessions = {}
    for way in WAYS:
        format, _, activations = way.partition(" x ")
        ir = plain if format == "bfloat16" else nn.passes.quantize_weights(plain, format)
        ir = nn.passes.quantize_activations(ir) if activations else ir
        sessions[way] = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True)).load(weights)
    for count in rows:
        x, least = torch.randn(count, INPUTS).bfloat16(), dict.fromkeys(WAYS, float("inf"))
        for _ in range(CALLS + 1):
            for way, session in sessions.items():
                begin = time.process_time()
                session["forward"](x)
                least[way] = min(least[way], time.process_time() - begin)
        operations = 2 * count * OUTPUTS * INPUTS
        print(
            json.dumps({"rows": count} | {way: operations / t / 1e9 for way, t in least.items()}), flush=True
        )


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--here", choices=("tiles", "none"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        one(args.rows, args.here == "tiles")
        return
    from nnfront.backends.cpu.extension import NATIVE

    rows: list[dict[str, Any]] = []
    for name, (kernels, has_tiles, torchs) in SETS.items():
        if NATIVE is None or kernels not in NATIVE.sets or (has_tiles and not NATIVE.has_tiles()):
            continue
        given = {"NNFRONT_INSTRUCTIONS": kernels, "ONEDNN_MAX_CPU_ISA": torchs, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--here", "tiles" if has_tiles else "none", "--rows"]
        done = subprocess.run(
            [*command, *map(str, args.rows)],
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            check=True,
        )
        rows += [
            {"instructions": name} | json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"
        ]
    print(keep("activations_cpu", describe("torch"), rows))
    print(table(rows))


if __name__ == "__main__":
    main()
