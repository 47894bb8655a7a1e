# SPDX-License-Identifier: Apache-2.0
"""What happens to a module between export and running, timed pass by pass: a Llama with 70B dimensions (no weights), prefill and decode.

    python bench/passes.py [--layers 1 16 32 80] [--modes shared unshared]

Each pass gets what the one before it made; `compile`, which runs a target's pipeline and chooses kernels, gets what is lifted. Times are processor time, the least of several in one process, without verification; the first
uses of torch's meta device and the like are warmed up. The exponent of a pass is the slope of log(time) over log(layers) from 16 layers
on: 1 is linear.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable
from typing import Any

from machine import describe, keep, table
from nnfront_models import llama

import nnfront as nn
from nnfront.backends.lowering import lower
from nnfront.backends.table import memory_policy
from nnfront.memory.report import report_memory

MEMORY = memory_policy("cpu")

# What is timed beside the others, as it runs several of them.
WHOLE = "compile"
# Fewer layers are mostly fixed costs.
FITTED = 16
SIZES = {"batch": 1, "seq": 2048, "max_seq": 4096}


def export(layers: int, mode: str) -> nn.ir.IRModule:
    """Return prefill and decode of a Llama with so many layers."""
    config = llama.Config(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        dtype="bfloat16",
    )
    spec = llama.export_spec(config)
    methods = {name: spec[name] for name in ("prefill", "decode")}
    return llama.build(config).export(methods, share_layers=mode == "shared")


def steps() -> dict[str, Callable[[Any], Any]]:
    """Return what is timed, in order: each takes what the one before it gave."""
    passes = nn.passes
    return {
        "lift": lambda ir: passes.lift_transform_params(ir, shared_transform=True),
        WHOLE: nn.compile,
        "fold_constants": passes.fold_constants,
        "canonicalize": passes.canonicalize,
        "eliminate_common_subexpressions": passes.eliminate_common_subexpressions,
        "eliminate_dead_code": passes.eliminate_dead_code,
        "apply_dtype_policy": lambda ir: passes.apply_dtype_policy(ir, "bfloat16"),
        "special_cases": lambda ir: passes.special_cases(ir, "decode", [{"batch": 1}, {"batch": (2, 8)}]),
        "outline": passes.outline,
        "lower": lower,
        "plan_memory": lambda program: report_memory(program, SIZES, MEMORY),
    }


def timed(function: Callable[[Any], Any], given: Any, repeats: int) -> tuple[Any, float]:
    """Return the result and the least seconds of several calls."""
    times = []
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        result = function(given)
        times.append(time.process_time() - start)
    return result, min(times)


def slope(points: list[tuple[int, float]]) -> float:
    """Return the slope of the straight line that fits best through the logarithms."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - mean_x) ** 2 for x in xs)


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 16, 32, 80])
    parser.add_argument("--modes", nargs="+", default=["shared", "unshared"])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for mode in args.modes:
        seconds: dict[str, dict[int, float]] = {}
        for layers in args.layers:
            value: Any = export(layers, mode)
            for name, step in steps().items():
                made, seconds.setdefault(name, {})[layers] = timed(step, value, args.repeats)
                value = value if name == WHOLE else made
        seconds["sum"] = {
            n: sum(times[n] for name, times in seconds.items() if name != WHOLE) for n in args.layers
        }
        for name, times in seconds.items():
            row: dict[str, Any] = {"mode": mode, "pass": name}
            row |= {f"{n} layers, ms": 1e3 * t for n, t in times.items()}
            fitted = [(n, t) for n, t in times.items() if n >= FITTED]
            if len(fitted) > 1:
                row["exponent"] = slope(fitted)
            rows.append(row)
        print(table([row for row in rows if row["mode"] == mode]), flush=True)
    print(keep("passes", describe("torch"), rows))


if __name__ == "__main__":
    main()
