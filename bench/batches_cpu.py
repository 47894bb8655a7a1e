# SPDX-License-Identifier: Apache-2.0
"""What a decode step of several sequences costs on a CPU: tokens a second for each number of rows, as multiples of those of one row.

    python bench/batches_cpu.py [--rows 1 2 4 8 16 32 64] [--quant bfloat16 int8 int4 int8-int8 int4-int8] [--rounds 5]

A Llama with six layers of Qwen2.5-0.5B's shape and random weights, 64 tokens in the cache; batches alternate in one process, medians. Behind a dash: what activations are rounded to.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from machine import describe, keep, table
from nnfront_models import llama

import nnfront as nn

FILLED = 64
CONFIG = llama.Config(
    vocab_size=32000,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=6,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    dtype="bfloat16",
)


def session_of(quant: str) -> nn.Session:
    """Return a session with random weights, in a format."""
    ir = llama.build(CONFIG).export(llama.export_spec(CONFIG))
    torch.manual_seed(0)
    weights = {p.name: (torch.randn(p.type.shape) / 32).bfloat16() for p in ir["logits"].weights}
    format, _, activations = quant.partition("-")
    if format != "bfloat16":
        ir = nn.passes.quantize_weights(ir, format)
    ir = nn.passes.quantize_activations(ir) if activations else ir
    return nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True)).load(weights)


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--quant", nargs="+", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for quant in args.quant:
        session = session_of(quant)
        given = {
            rows: session.random_arguments("decode", batch=rows, max_seq=FILLED * 8, filled=FILLED)
            for rows in args.rows
        }
        times: dict[int, list[float]] = {rows: [] for rows in args.rows}
        for _ in range(args.rounds + 1):
            for rows, (tokens, cache) in given.items():
                begin = time.perf_counter()
                for _ in range(4):
                    session["decode"](tokens, cache)
                times[rows].append((time.perf_counter() - begin) / 4)
        medians = {rows: statistics.median(each[1:]) for rows, each in times.items()}
        one = medians[args.rows[0]]
        row: dict[str, Any] = {"format": quant, "one row ms": 1e3 * one}
        row |= {f"{rows} rows": rows * one / medians[rows] for rows in args.rows[1:]}
        found.append(row)
    machine = describe("torch")
    print(keep("batches_cpu", machine, found))
    print(table(found))


if __name__ == "__main__":
    main()
