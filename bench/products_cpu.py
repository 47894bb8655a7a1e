# SPDX-License-Identifier: Apache-2.0
"""What a product of a few rows costs on a CPU in each format of weights: tokens a second for each number of rows, as multiples of those of the first, and how much of what a thread reads from
memory one row reads.

    python bench/products_cpu.py [--rows 1 8 16 32] [--formats bfloat16 int4 nvfp4 ...] [--instructions avx2] [--rounds 7] [--outputs 9728] [--columns 896]

One thread, its processor time, the least of several rounds in which all take turns; each call reads another copy of the weight, so that it comes from memory.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from machine import describe, keep, table

from nnfront.backends.cpu.extension import NATIVE, TILES, work_bytes
from nnfront.backends.cpu.quantized_gemv import GROUPS, SCALE_KINDS, stored_as, table_of
from nnfront.ir import OPS
from nnfront.quant_format import BLOCK_FORMATS, FORMATS, QuantFormat

GROUPED = {f"{name} {group}": replace(FORMATS[name], group_size=group) for name in ("int8", "int4", "uint4") for group in GROUPS}  # fmt: skip
KNOWN: dict[str, QuantFormat | None] = {
    "bfloat16": None,
    **{name: FORMATS[name] for name in ("int8", "fp8")},
    "fp8 128": replace(FORMATS["fp8"], group_size=128),
    **GROUPED,
    **{name: FORMATS[name] for name in ("mxfp4", "nvfp4", "nl4", *BLOCK_FORMATS)},
}
COPIES = 80_000_000  # bytes of each weight
NO_ACTIVATION = 9


def operands(format: QuantFormat | None, outputs: int, columns: int) -> list[torch.Tensor | None]:
    """A random weight, scales, and zero points or what scales in float8 are multiplied by."""
    if format is None:
        return [torch.randn(outputs, columns).bfloat16()]
    if format.block is not None:
        blocks = OPS["quantize_blocks"].run((torch.randn(64, columns),), {"format": format.name})
        return [blocks.repeat(-(-outputs // 64), 1)[:outputs].contiguous(), None, None]
    width = columns // (1 if format.packing is None else 2)
    weight = torch.randint(0, 256, (outputs, width), dtype=torch.uint8)
    if format.name == "fp8":
        weight[weight % 128 == 127] -= 1  # no NaN
    groups = columns // format.group_size if format.group_size else 1
    scales = torch.rand(outputs, groups) / 8 + 0.01
    if format.scale_values:
        scales = torch.randint(120, 130, (outputs, groups), dtype=torch.uint8)
    elif format.has_factor:
        return [weight, scales.to(torch.float8_e4m3fn), torch.rand(outputs, 1)]
    elif format.read_scales is None:
        scales = scales.bfloat16()
    zeros = None if format.symmetric else torch.randint(0, 16, (outputs, groups), dtype=torch.uint8)
    return [weight, scales, zeros]


@cache
def working(kernel: str, rows: int, columns: int, groups: int) -> torch.Tensor:
    """What a product works in."""
    sizes = {"rows": rows, "columns": columns, "groups": groups, "with_tiles": TILES}
    return torch.empty(work_bytes(kernel, sizes), dtype=torch.uint8)


def multiply(format: QuantFormat | None, stored: list[Any], x: torch.Tensor, y: torch.Tensor) -> None:
    """Write the product to y, by one thread."""
    rows, columns, outputs = len(x), x.shape[1], y.shape[1]
    assert NATIVE is not None
    if format is None:
        work = working("multiply", rows, columns, 1)
        NATIVE.multiply(rows, columns, outputs, 0, NO_ACTIVATION, TILES, 1, *stored, x, None, None, work, y)
        return
    values, unit = table_of(format)
    groups = columns // format.group_size if format.group_size else 1
    kind = 0 if stored[1] is None else SCALE_KINDS[stored[1].dtype]
    sizes = stored_as(format), rows, columns, outputs, groups, kind, *values
    work = working("multiply_quantized", rows, columns, groups)
    NATIVE.multiply_quantized(*sizes, 0, TILES, 1, unit, *stored, x, None, None, work, y)


def seconds(function: Any, *args: Any) -> float:
    """The processor time of a call."""
    begin = time.process_time()
    function(*args)
    return time.process_time() - begin


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--formats", nargs="+", choices=KNOWN, default=list(KNOWN), metavar="FORMAT")
    parser.add_argument("--instructions")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--outputs", type=int, default=9728)
    parser.add_argument("--columns", type=int, default=896)
    args = parser.parse_args()
    assert NATIVE is not None, "the kernels in C were not built"
    if args.instructions:
        NATIVE.use_set(args.instructions)
    torch.set_num_threads(1)
    weights: dict[str, list[list[Any]]] = {}
    size: dict[str, int] = {}
    for name in args.formats:
        first = operands(KNOWN[name], args.outputs, args.columns)
        size[name] = sum(part.nbytes for part in first if part is not None)
        copies = range(max(COPIES // size[name], 1))
        weights[name] = [[part if part is None else part.clone() for part in first] for _ in copies]
    x = {rows: torch.randn(rows, args.columns).bfloat16() for rows in args.rows}
    y = {rows: torch.empty(rows, args.outputs).bfloat16() for rows in args.rows}
    least, read, memory = {}, 0.0, torch.ones(40_000_000)
    for _ in range(args.rounds):
        read = max(read, memory.nbytes / 1e9 / seconds(memory.sum))
        for name, copies_of in weights.items():
            for rows in args.rows:

                def run(name: str = name, rows: int = rows, copies_of: Any = copies_of) -> None:
                    for stored in copies_of:
                        multiply(KNOWN[name], stored, x[rows], y[rows])

                found = seconds(run) / len(copies_of)
                least[name, rows] = min(found, least.get((name, rows), found))
    rows_of: list[dict[str, Any]] = []
    for name in args.formats:
        one = least[name, args.rows[0]]
        row = {"format": name, "ms": 1e3 * one, "share of memory": size[name] / 1e9 / one / read}
        row |= {f"{rows} rows": rows / args.rows[0] * one / least[name, rows] for rows in args.rows[1:]}
        rows_of.append(row)
    machine = {**describe("torch"), "instructions": NATIVE.used_set(), "memory GB/s": f"{read:.1f}"}
    print(keep(f"products_cpu_{NATIVE.used_set()}", machine, rows_of))
    print(table(rows_of))


if __name__ == "__main__":
    main()
