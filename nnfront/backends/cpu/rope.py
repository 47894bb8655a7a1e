# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings on a CPU: by tables of cosines and signed sines that are made once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from nnfront import dtypes
from nnfront.backends.cpu.decode_attention import are_tables
from nnfront.backends.cpu.elementwise import FLOATS, emit
from nnfront.backends.cpu.in_c import kernel
from nnfront.backends.cpu.tape_builder import Operand, TapeBuilder, Value, demand, demand_bfloat16
from nnfront.backends.kernel import Context, Kernel, always
from nnfront.ir import TensorType, TupleType
from nnfront.lower import Run
from nnfront.memory.allocations import Workspace
from nnfront.memory.layout import Layout


def is_interleaved(run: Run) -> bool:
    """Whether neighbours are pairs, not halves."""
    return bool(run.attrs.get("interleaved", False))


def _as_rotated(run: Run, context: Context) -> Run:
    """Rope by tables of the whole head, which are the same for all layers."""
    x, cos, sin = run.inputs
    return replace(run, inputs=(x, *rope_tables(run, x, cos, sin, context)))


def rope_tables(run: Run, x: int, cos: int, sin: int, context: Context) -> tuple[int, ...]:
    """The tables by which `x` is rotated, made where the first of their readers is."""
    dtype = "float64" if context.tensor(x).dtype == "float64" else "float32"
    attrs = {"dtype": dtype, "interleaved": is_interleaved(run)}
    key = ("rope_tables", cos, sin, *attrs.values())
    made = context.shared.get(key)
    if made is None:
        *outer, pairs = context.tensor(cos).shape
        type = TensorType((*outer, 1, 2 * pairs), dtype)
        made = context.emit(run, "rope", (cos, sin), attrs, TupleType((type, type)), kernel="rope_tables")
        context.shared[key] = made
    return made


def _rope_tables(run: Run) -> Callable[..., Any]:
    """Cosines of both features of each pair, and sines with the sign of each: what `rope_rotated` multiplies by.

    Shapes: cos and sin [..., seq, pairs], both results [..., seq, 1, 2 * pairs].
    """
    dtype: torch.dtype = getattr(torch, run.attrs["dtype"])
    axis = -1 if is_interleaved(run) else -2

    def join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.stack([first, second], axis).flatten(-2)

    def rope_tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.to(dtype), sin.to(dtype)
        return join(cos, cos).unsqueeze(-2), join(-sin, sin).unsqueeze(-2)

    return rope_tables


def rope_rotated(run: Run) -> Callable[..., Any]:
    """x * cos + (x with those of each pair swapped) * sin, in three calls of torch instead of sixteen.

    One row of 32 heads of 64: 5 us against 20; 512 rows: 0.34 ms (one thread).
    """
    are_neighbours = is_interleaved(run)

    def swapped(x: torch.Tensor) -> torch.Tensor:
        if are_neighbours:
            return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).flip(-1).flatten(-2)
        return torch.roll(x, x.shape[-1] // 2, -1)

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size = cos.shape[-1]
        rest = x.shape[-1] - size
        rotated = x.narrow(-1, 0, size) if rest else x
        if x.dtype != cos.dtype:
            rotated = rotated.to(cos.dtype)
        y = swapped(rotated).mul_(sin).addcmul_(rotated, cos)
        if x.dtype != cos.dtype:
            y = y.to(x.dtype)
        return torch.cat([y, x.narrow(-1, size, rest)], -1) if rest else y

    return rotate


def _write_tables(builder: TapeBuilder, run: Run, cos: Value, sin: Value) -> Sequence[Operand]:
    """Both halves of each table, or each second element of it."""
    demand(run.attrs["dtype"] == "float32", f"tables are {run.attrs['dtype']}")
    demand(cos.dtype in FLOATS and sin.dtype in FLOATS and cos.shape == sin.shape, "they are no floats")
    *outer, pairs = cos.shape
    demand(prod(cos.shape) > 0, "there are no rows")
    step, apart = (2, 1) if is_interleaved(run) else (1, pairs)
    shape, steps = (prod(outer), pairs), [2 * pairs, step]
    made = []
    for slot, x, first in zip(run.outputs, (cos, sin), ("copy", "negative"), strict=True):
        y = builder.make(slot, (*outer, 1, 2 * pairs), torch.float32)
        for operation, offset in ((first, 0), ("copy", apart)):
            part = Value(y.place + offset * y.dtype.itemsize, shape, y.dtype)
            emit(builder, operation, shape, (part, steps), (x, [pairs, 1]))
        made.append(y)
    return made


def _rope_tables_bytes(run: Run, cos: Layout, sin: Layout) -> int:
    """The negated sines, and both tables if they have to be converted."""
    wide = cos.count * dtypes.size_bytes(run.attrs["dtype"])
    return wide if cos.dtype == run.attrs["dtype"] else 3 * wide


def rope_rotated_bytes(run: Run, x: Layout, cos: Layout, sin: Layout) -> int:
    """For a half type what is rotated and its result in float32; where a part of the features is rotated, that part."""
    rotated = x.count // max(x.shape[-1], 1) * cos.shape[-1]
    wide = rotated * cos.item if x.dtype != cos.dtype else 0
    if cos.shape[-1] == x.shape[-1]:
        return 2 * wide
    return max(2 * wide - x.size_bytes, wide) + rotated * x.item


def _write(builder: TapeBuilder, run: Run, x: Value, cos: Value, sin: Value) -> Sequence[Operand]:
    batch, seq, heads, size = x.shape
    rows, kind = batch * seq, (cos.shape[-1], is_interleaved(run))
    demand_bfloat16(x=x)
    builder.limit_count(prod(x.shape), None, "elements")
    next_table = table_step(cos, rows, size)
    y = builder.make(run.outputs[0], x.shape)
    sizes = rows, heads, size, *kind, heads * size, next_table, builder.threads
    builder.call("rotate", *sizes, x, cos, sin, y)
    return (y,)


def table_step(table: Value, rows: int, size: int) -> int:
    """Elements from one row's table for heads of `size` features to the next one's."""
    is_table = table.dtype == torch.float32 and are_tables(table.shape, rows, size)
    demand(is_table, "tables are neither of each row nor of all rows, or not float32")
    return 0 if prod(table.shape) == table.shape[-1] else table.shape[-1]


TABLES = Kernel("rope_tables", "", _rope_tables, workspace=Workspace(_rope_tables_bytes), write=_write_tables)
KERNELS = (
    TABLES,
    kernel(
        "rope_rotated",
        "rope",
        _write,
        rope_rotated,
        "tables made once for all layers, then three calls",
        always,
        _as_rotated,
        held=rope_rotated_bytes,
    ),
)
