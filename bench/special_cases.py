# SPDX-License-Identifier: Apache-2.0
"""What special cases cost and gain on a CPU: asking, counting, export, and the variant against the general function.

    python bench/special_cases.py [FOLDER] [--names llama-3.2-1b]

The shipped model is always measured; FOLDER holds the checkpoints that `bench/checkpoints.py` writes (they are written if absent) for
those named. Decode is specialised for a batch of 1, prefill for lengths that are multiples of 64 and of 16. Variant and general
function alternate in one process over the same weights; medians of processor time, which other processes disturb least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import write
from machine import describe, keep, table

import nnfront as nn
from nnfront.ir import parse
from nnfront.llm.model_files import read_folder

SHIPPED = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
CASES: dict[str, list[dict[str, Any]]] = {
    "decode": [{"batch": 1}],
    "prefill": [{"batch": 1, "seq": nn.multiple_of(64)}, {"seq": nn.multiple_of(16)}],
}
CONTEXT = 256


def seconds(run: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of one call."""
    start = clock()
    for _ in range(repeats):
        run()
    return (clock() - start) / repeats


def alternating(
    runs: dict[str, Callable[[], Any]],
    rounds: int,
    repeats: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each of several runs, one after the other in each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, repeats, clock))
    return {name: statistics.median(values) for name, values in times.items()}


def asking(rounds: int) -> list[dict[str, Any]]:
    """What a dispatch adds to a call of nearly nothing, by the number of cases asked before the general function; processor time."""
    text = "def main[n, m](x: input float32[n, m], k: input int64) -> float32[n, m] { y: float32[n, m] = relu(x) return y }"
    kinds: dict[str, Callable[[int], list[dict[str, Any]]]] = {
        "a dim": lambda count: [{"n": 100 + i} for i in range(count)],
        "two dims": lambda count: [{"n": 100 + i, "m": nn.multiple_of(7)} for i in range(count)],
        "a host number": lambda count: [{"k": 100 + i} for i in range(count)],
    }
    plain = nn.compile(parse(text)).load({})["main"]
    x, rows = torch.zeros(4, 4), []
    for kind, make in kinds.items():
        for count in (1, 4):
            ir = nn.passes.special_cases(parse(text), "main", make(count))
            special = nn.compile(ir).load({})["main"]
            runs = {"plain": lambda: plain(x, 3), "special": lambda special=special: special(x, 3)}
            found = alternating(runs, rounds, 2000, time.process_time)
            added = (found["special"] - found["plain"]) * 1e6
            rows.append(
                {
                    "asked": kind,
                    "cases asked": count,
                    "us a call without": found["plain"] * 1e6,
                    "us added": added,
                }
            )
    return rows


def counting() -> float:
    """Nanoseconds of one count."""
    ir = nn.passes.special_cases(
        parse("def main[n](x: input float32[n]) -> float32[n] { y: float32[n] = relu(x) return y }"),
        "main",
        [{"n": 1}],
    )
    step = nn.compile(ir).load({})["main"]._hits._counts["general"].__next__
    return min(seconds(step, 100_000) for _ in range(5)) * 1e9


def built(folder: Path, special: bool) -> tuple[Any, dict[str, float]]:
    """The executable of a model, and how long each step took."""
    architecture, config, _ = read_folder(folder, None)
    spec = architecture.file.export_spec(config)
    for method in CASES if special else ():
        spec[method]["$"] = {"special_cases": CASES[method]}
    model = architecture.file.build(config)
    times = {}
    start = time.process_time()
    ir = model.export(spec)
    times["export"] = time.process_time() - start
    start = time.process_time()
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    times["lift"] = time.process_time() - start
    start = time.process_time()
    executable = nn.compile(ir)
    times["compile"] = time.process_time() - start
    return executable, times


def model_rows(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """The variants of a model against its general functions."""
    plain, special = (statistics_of([built(folder, flag)[1] for _ in range(5)]) for flag in (False, True))
    rows: list[dict[str, Any]] = [
        {
            "model": folder.name,
            "what": f"{step} ms",
            "general": plain[step] * 1e3,
            "special": special[step] * 1e3,
        }
        for step in plain
    ]
    executable = built(folder, True)[0]
    session = executable.load(nn.Checkpoint(folder))
    tokens = torch.randint(2, 200, (1, CONTEXT))
    for method, seq in (("decode", 1), ("prefill", 16), ("prefill", 64), ("prefill", 192)):
        ids = tokens[:, :seq]
        cache = session.make_cache(batch=1, max_seq=CONTEXT + seq)
        session["prefill"](tokens[:, : CONTEXT - seq], cache)
        case = session.explain(method, ids, cache).taken
        assert case != "general"
        methods = {"general": session[method].only("general"), "special": session[method].only(case)}

        def run(method: Any, ids: torch.Tensor = ids, cache: Any = cache, kept: int = cache.length()) -> None:
            method(ids, cache)
            cache.truncate(kept)

        repeats = 20 if seq == 1 else 3
        found = alternating(
            {name: lambda method=method: run(method) for name, method in methods.items()},
            rounds,
            repeats,
            time.process_time,
        )
        what = f"{method} of {seq}, ms ({case})"
        rows.append(
            {"model": folder.name, "what": what, **{name: value * 1e3 for name, value in found.items()}}
        )
    return rows


def mask_rows(rounds: int) -> list[dict[str, Any]]:
    """Attention under a mask that the caller gives: the variant for the causal one needs none, but has to look at it."""
    text = """def main[s](q: input float32[1, s, 8, 64], k: input float32[1, s, 8, 64], v: input float32[1, s, 8, 64], mask: input float32[s, s])
        -> float32[1, s, 8, 64] { y: float32[1, s, 8, 64] = scaled_dot_product_attention(q, k, v, mask) return y }"""
    ir = nn.passes.special_cases(parse(text), "main", [{"mask": nn.causal}])
    method = nn.compile(ir).load({})["main"]
    plain = nn.compile(parse(text)).load({})["main"]
    rows = []
    for seq in (128, 1024):
        args = (*torch.randn(3, 1, seq, 8, 64).unbind(), torch.full((seq, seq), -torch.inf).triu(1))
        runs = {"general": lambda args=args: plain(*args), "special": lambda args=args: method(*args)}
        found = alternating(runs, rounds, 3, time.process_time)
        what = f"attention of {seq}, 8 heads of 64, ms (mask is causal)"
        rows.append(
            {"model": "attention", "what": what, **{name: value * 1e3 for name, value in found.items()}}
        )
    return rows


def statistics_of(times: list[dict[str, float]]) -> dict[str, float]:
    """The median of each step."""
    return {step: statistics.median(t[step] for t in times) for step in times[0]}


def main() -> None:
    """Measure, print tables and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--names", nargs="+", default=["llama-3.2-1b"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    folders = [SHIPPED, *(write(name, args.folder) for name in (args.names if args.folder else ()))]
    asked = asking(args.rounds)
    print(table(asked), f"\none count: {counting():.0f} ns\n", flush=True)
    rows = mask_rows(args.rounds) + [row for folder in folders for row in model_rows(folder, args.rounds)]
    for row in rows:
        row["general / special"] = row["general"] / row["special"]
    print(table(rows))
    machine = {**describe("torch"), "threads": str(args.threads)}
    print(keep("special_cases", machine, [*asked, {"ns of one count": counting()}, *rows]))


if __name__ == "__main__":
    main()
