# SPDX-License-Identifier: Apache-2.0
"""Calls of any kernel in C, made of the table that says what it takes: sizes, operands, and how many bytes of these it needs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from nnfront.backends.cpu.extension import KERNELS, NATIVE, TABLE, read_table, work_bytes
from nnfront.backends.cpu.tape_builder import NOWHERE, Place, TapeBuilder

Argument = tuple[str, str, str]  # kind, name, and of an operand how many bytes
ARGUMENTS: dict[str, list[Argument]] = {
    kernel: re.findall(r"(SIZE|REAL|IN|OUT)\((\w+)(?:,(.*?))?\)(?=SIZE|REAL|IN\(|OUT\(|$)", text)
    for kernel, text in read_table(TABLE.read_text()).items()
}
OPERANDS = {
    kernel: [(name, need) for kind, name, need in arguments if kind in ("IN", "OUT")]
    for kernel, arguments in ARGUMENTS.items()
}
# Sizes that kernels compute with, by name, where any small number will not do.
RANGES = {"rows": [*range(1, 9), 16, 17, 33, 64], "threads": range(1, 3), "is_wide": range(2), "is_centered": range(2), "is_interleaved": range(2), "has_wide_sinks": range(2), "softcap": [0.0, 3.0], "activation": range(5), "gate": range(5), "with_tiles": range(2), "is_wide_state": range(2), "has_gates_of_keys": range(2), "is_normed": range(2), "stored": range(10), "scale_kind": range(4), "is_wide_x": range(2), "is_transposed": range(2), "kind": range(2), "x_kind": range(3), "other_kind": range(5), "y_kind": range(3)}  # fmt: skip


def may_be_absent(kernel: str) -> set[str]:
    """Operands of which nothing is needed where they are not there."""
    return {name for name, need in OPERANDS[kernel] if need.startswith(f"{name}*")}


def span(count: int, step: int, last: int) -> int:
    return (count > 0) * ((count - 1) * step + last)


def reach(*sizes_and_steps: int) -> int:
    sizes, steps = sizes_and_steps[:4], sizes_and_steps[4:]
    last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    return all(sizes) * (1 + last)


def blocks(stored: int, columns: int) -> int:
    whole, half = {7: (144, 80), 8: (176, 112)}.get(stored, (210, 106))
    return columns // 256 * whole + (columns % 256 > 0) * half


def drawn(kernel: str, pick: random.Random) -> dict[str, Any]:
    """Sizes, and for each operand whether it is there."""
    found: dict[str, Any] = {
        "SPAN": span,
        "REACH": reach,
        "BLOCKS": blocks,
        "LEAST": min,
        "ITEM": [2, 4, 1, 4, 8].__getitem__,
        "SCALE": [2, 4, 1, 1].__getitem__,
    }
    for kind, name, _ in ARGUMENTS[kernel]:
        if kind == "SIZE":
            found[name] = pick.choice(RANGES.get(name, range(1, 40)))
        elif kind == "REAL":
            found[name] = pick.choice(RANGES.get(name, [0.5]))
        else:
            found[name] = name not in may_be_absent(kernel) or pick.random() < 0.5
    if kernel == "append_and_attend":
        found |= {"batch": pick.randint(1, 3), "groups": pick.randint(1, 3), "size": pick.randint(1, 70)}
        wide = found["groups"] * found["size"]
        found |= {"next_q": wide * found["shared"], "next_k": wide + 8, "next_v": wide}
        found |= {"tokens": pick.randint(1, 3), "columns": pick.randint(1, 4), "pool": pick.randint(1, 5)}
        found["capacity"] = max(found["capacity"], found["tokens"])
        # Keys whose first features are the values, or values of their own; tokens of both, or none.
        if not found["values"]:
            found |= {"v": False, "value_size": pick.randint(1, found["size"])}
        else:
            found["v"] = found["k"]
        found["value_scales"] = found["key_scales"] and found["values"]
        room = found["capacity"] * (found["columns"] if found["pages"] else 1)
        found |= {"positions": room + pick.randint(0, 9), "bias_bytes": pick.choice([1, 2, 4])}
    if "heads" in found and "groups" in found:
        found |= {"batch": pick.randint(1, 3), "groups": pick.randint(1, 3)}
        found["heads"] = found["groups"] * pick.randint(1, 3)
    if kernel == "elementwise":
        n = [pick.randint(2, 5) for _ in range(4)]
        found |= {f"n{i}": size for i, size in enumerate(n)}
        found |= {f"y{i}": prod(n[i + 1 :]) for i in range(4)}
        found["operation"] = pick.randint(0, 16)
    if kernel == "add_low_rank":
        found |= {"sequences": pick.randint(1, 9), "tokens": pick.randint(1, 3)}
    if kernel == "reduce":
        found["operation"] = pick.randint(0, 2)
    if kernel == "largest":
        found["k"] = pick.randint(1, found["size"])
    if kernel == "rotate":
        found["rotated"] = 2 * pick.randint(0, found["size"] // 2)
    if kernel in ("multiply_quantized", "multiply_dequantized", "dequantize", "embed"):
        if found["scale_kind"] == 3:
            found |= {"stored": 6, "zeros": True}
        is_grouped = found["stored"] in (1, 3, 4, 5, 6)
        sizes = [128] if found["stored"] == 3 else [32, 64, 128]
        found["groups"] = pick.randint(1, 3) if is_grouped else 1
        found["columns"] = found["groups"] * pick.choice(sizes) if is_grouped else found["columns"]
        found["columns"] = 128 * pick.randint(1, 5) if found["stored"] > 6 else found["columns"]
    if kernel == "embed":
        is_read = found["stored"] in (0, 1, 4, 5) and found["scale_kind"] < 2
        found["is_packed"] = pick.randint(0, 1) if is_read and found["columns"] % 8 == 0 else 0
    if kernel in ("multiply", "multiply_gated"):
        # More columns, and outputs, than many rows are multiplied with at once.
        found["columns"] += pick.choice([0, 1 << 10])
        found["outputs"] += pick.choice([0, 1 << 6])
    if kernel == "multiply_integers":
        found["stored"] = pick.choice([0, 1, 4, 5, 7, 8, 9])
        found["groups"] = pick.randint(1, 3) if found["stored"] else 1
        found["columns"] = (
            found["groups"] * pick.choice([32, 64, 128]) if found["stored"] else found["columns"]
        )
        found["scale_kind"] = pick.randint(0, 1)
        found["is_packed"] = pick.randint(0, 1)
        found["is_rounded"] = pick.randint(0, 1) if found["is_packed"] and found["stored"] < 7 else 1
        if found["stored"] > 6:
            columns = 128 * pick.randint(1, 5)
            groups = columns // (16 if found["stored"] == 9 else 32)
            found |= {"columns": columns, "groups": groups, "scale_kind": 0, "is_packed": 0}
        if found["is_packed"]:
            # As many panels as one row meets in turn, and outputs that fill none; gates do.
            outputs = 16 * pick.randint(1, 5) + (found["gate"] > 3) * pick.randint(-15, 15)
            found |= {"outputs": outputs, "columns": -(-found["columns"] // 4) * 4}
    return found


def needed(kernel: str, sizes: dict[str, Any]) -> dict[str, int]:
    """How many bytes of each operand, rounded up."""
    return {name: -int(-eval(need, {}, sizes) // 1) for name, need in OPERANDS[kernel]}


def filled(name: str, count: int, sizes: dict[str, Any]) -> torch.Tensor:
    """An operand with something in it, for `lengths` how many tokens a cache holds."""
    if name == "lengths":
        room = sizes["capacity"] * (sizes["columns"] if sizes["pages"] else 1)
        lengths = torch.arange(sizes["tokens"], count // 4 + sizes["tokens"], dtype=torch.int32)
        return lengths.clamp_(max=room).view(torch.uint8)
    if name == "pages":
        return (torch.arange(count // 4, dtype=torch.int32) % sizes["pool"]).view(torch.uint8)
    if name in ("key_scales", "value_scales"):
        return torch.ones(count // 4).view(torch.uint8)
    if name in ("keys", "values") and sizes.get("key_scales"):
        return torch.randint(0, 120, (count,), dtype=torch.uint8)
    if name == "bias" and "bias_bytes" in sizes:
        kinds = {1: torch.bool, 2: torch.bfloat16, 4: torch.float32}
        values = torch.randn(count // sizes["bias_bytes"])
        return values.to(kinds[sizes["bias_bytes"]]).view(torch.uint8)
    if name == "tokens":
        return torch.randint(0, sizes["outputs" if "outputs" in sizes else "rows"], (count // 8,)).view(
            torch.uint8
        )
    if "tokens" in sizes and name in ("x", "y"):
        return torch.randint(0, 255, (count,), dtype=torch.uint8)
    if name == "work":
        return torch.zeros(count, dtype=torch.uint8)
    if (name == "indices" and "values" not in sizes) or name == "chosen":
        most = sizes["size" if name == "indices" else "count"]
        return torch.randint(0, most, (count // 4,), dtype=torch.int32).view(torch.uint8)
    if {"kind", "x_kind"} & sizes.keys():
        return torch.randint(0, 255, (count,), dtype=torch.uint8)
    if name in ("quantized", "zeros") or (name == "scales" and sizes["scale_kind"] >= 2):
        return torch.randint(0, 16, (count,), dtype=torch.uint8)
    if name in ("g", "dt", "a", "beta", "d") or (name == "state" and sizes.get("is_wide_state", True)):
        return torch.randn(count // 4).view(torch.uint8)
    if name == "next":
        return torch.zeros(count, dtype=torch.uint8)
    if "is_wide_state" in sizes and name in ("weight", "bias") and sizes["is_wide"]:
        return torch.randn(count // 4).view(torch.uint8)
    is_sink = name == "sinks" and sizes["has_wide_sinks"]
    is_vector = name in ("weight", "bias") and "is_centered" in sizes and sizes["is_wide"]
    wide = name in ("cos", "sin") or (name == "scales" and sizes["scale_kind"] == 1) or is_vector or is_sink
    return (
        torch.randn(count // (4 if wide else 2))
        .to(torch.float32 if wide else torch.bfloat16)
        .view(torch.uint8)
    )


def working(kernel: str, sizes: dict[str, Any]) -> torch.Tensor:
    """What a kernel works in."""
    return torch.empty(work_bytes(kernel, sizes), dtype=torch.uint8)


def operands_of(kernel: str, sizes: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    there = needed(kernel, sizes)
    return {name: filled(name, n, sizes) if sizes[name] and n else None for name, n in there.items()}


@contextmanager
def only_by_tiles(kernel: str) -> Iterator[None]:
    """What is multiplied by matrix tiles alone is refused without them, when its operands have been found to be right; then nothing is written."""
    try:
        yield
    except ValueError as error:
        if kernel != "multiply_dequantized" or NATIVE.has_tiles() or "matrix tiles" not in str(error):
            raise


def call(kernel: str, sizes: dict[str, Any], operands: dict[str, Any]) -> None:
    with only_by_tiles(kernel):
        getattr(NATIVE, kernel)(*(operands.get(name, sizes[name]) for name in KERNELS[kernel]))


def call_by_row(kernel: str, sizes: dict[str, Any], operands: dict[str, Any], offset: int = 0) -> None:
    """The same as a row of a sequence; each operand lies `offset` bytes into a memory."""
    builder, memories = TapeBuilder(1, {}), [None]
    arguments = []
    for name in KERNELS[kernel]:
        value = operands.get(name, sizes[name])
        if isinstance(value, torch.Tensor):
            memories.append(value)
            value = Place(len(memories) - 1, offset)
        arguments.append(NOWHERE if value is None else value)
    builder.call(kernel, *arguments)
    assert NATIVE is not None
    with only_by_tiles(kernel):
        NATIVE.run_sequence(torch.tensor(builder.rows, dtype=torch.int64), *memories)


def bits(operands: dict[str, torch.Tensor | None]) -> dict[str, bytes]:
    """What is in operands; in what a kernel works in may be anything, places too."""
    return {name: bytes(t.tolist()) for name, t in operands.items() if t is not None and name != "work"}
