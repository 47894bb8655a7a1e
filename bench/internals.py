# SPDX-License-Identifier: Apache-2.0
"""Costs that have no peer: verification, printing and parsing per binding, and the check of a call's arguments.

python bench/internals.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from machine import describe, keep, table
from nnfront_models import llama

import nnfront as nn
from nnfront import spec


def best(function: Callable[[], Any], repeats: int = 7) -> float:
    """Return the least seconds of several calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


class Four(nn.Module):
    """Takes four tensors and returns one of them: a call is all checks."""

    def forward(self, a: nn.Tensor, b: nn.Tensor, c: nn.Tensor, d: nn.Tensor) -> nn.Tensor:
        return a


def main() -> None:
    """Measure, print a table and keep the results."""
    config = llama.Config(num_hidden_layers=80, max_position_embeddings=8192)
    module = llama.build(config).export(llama.export_spec(config), share_layers=False)
    bindings = sum(len(f.bindings) for f in module.functions)
    text = str(module)
    rows: list[dict[str, Any]] = [
        {"what": name, "microseconds": 1e6 * seconds / bindings, "per": "binding"}
        for name, seconds in (
            ("verify", best(lambda: nn.ir.verify(module))),
            ("print", best(lambda: str(module), 3)),
            ("parse", best(lambda: nn.ir.parse(text), 3)),
            ("equal", best(lambda: module == nn.ir.IRModule(module.functions, module.attrs), 3)),
        )
    ]
    shapes = {"a": ["batch", "seq", 64], "b": ["batch", "seq"], "c": ["seq", 64], "d": ["batch", 8]}
    sizes = {"batch": 2, "seq": 16}
    ir = Four().export({"forward": {name: spec.Tensor(shape, "float32") for name, shape in shapes.items()}})
    run = nn.compile(ir).load({})["forward"]
    args = [torch.zeros([sizes.get(s, s) for s in shape]) for shape in shapes.values()]  # type: ignore[call-overload]
    count = 20_000

    def calls() -> None:
        for _ in range(count):
            run(*args)

    rows.append(
        {
            "what": "call of a method with four tensors and no ops",
            "microseconds": 1e6 * best(calls) / count,
            "per": "call",
        }
    )
    print(keep("internals", describe("torch"), rows))
    print(table(rows))


if __name__ == "__main__":
    main()
