# SPDX-License-Identifier: Apache-2.0
"""Copy rows of a buffer to a dense tensor, or back, wherever the buffer lies when the launch runs.

    rows[r] = there[at[r]]                read;  zeros where at[r] is below 0
    there[at[r]] = rows[r]                written;  nothing where at[r] is below 0

Shapes: there [..., width], whose rows begin at multiples of its width; at int64 [rows], which of them, counted from its first one; rows [rows, width], dense.
Elements of 1, 2, 4 or 8 bytes, copied as they are. base int64 [count], if given, says at `index` how many times 16 bytes behind `there` the buffer lies. It is read
on the device, as `at` is: so a captured launch gives torch the tokens and states of any cache of one layout, and puts back what torch has made of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import Config, Kernel, KernelError, Plan, empties, launcher, require_vector
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.tiles import cdiv

DTYPES = ("float16", "bfloat16", "float32")
WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class CopyShape:
    rows: int
    width: int
    writes: bool = False


def reference(
    there: torch.Tensor,
    at: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    compute: torch.dtype | None = None,
) -> torch.Tensor:
    """The definition, for a buffer that lies where it is; nothing is computed."""
    buffer = there.as_strided((int(at.max()) + 1, there.shape[-1]), (there.shape[-1], 1))
    if rows is not None:
        buffer[at[at >= 0]] = rows[at >= 0]
        return rows
    return buffer[at.clamp(min=0)].masked_fill((at < 0)[:, None], 0)


# Rows x columns of a block: tokens, whole states. 16 elements a thread, which keep reads wide. By arithmetic, not yet measured.
CONFIGS = (Config(16, 128, 1, 4, 1), Config(1, 2048, 1, 4, 1))


def choose(shape: CopyShape, dtype: str, arch: str) -> Config:
    """The first for rows that it holds whole, else the widest."""
    return CONFIGS[shape.width > CONFIGS[0].block_n]


@triton.jit(do_not_specialize=["index", "ROWS"])
def copy_rows_kernel(
    there_ptr,
    base_ptr,
    index,
    at_ptr,
    rows_ptr,
    ROWS,
    WIDTH,
    WRITES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    at = tl.load(at_ptr + row, mask=row < ROWS, other=-1)
    buffer = there_ptr
    if base_ptr is not None:
        buffer += tl.load(base_ptr + index) * (128 // there_ptr.dtype.element_ty.primitive_bitwidth)
    there = buffer + (at * WIDTH)[:, None] + column
    here = rows_ptr + (row.to(tl.int64) * WIDTH)[:, None] + column
    is_there = (at >= 0)[:, None] & (column < WIDTH)
    if WRITES:
        tl.store(there, tl.load(here, mask=is_there), mask=is_there)
    else:
        inside = (row < ROWS)[:, None] & (column < WIDTH)
        tl.store(here, tl.load(there, mask=is_there, other=0), mask=inside)


def accepts(shape: CopyShape, dtype: str, arch: str) -> str | None:
    """Elements of any dtype, on any GPU that Triton compiles for."""
    return None if shape.rows < 2**31 else f"there must be less than 2^31 rows, got {shape.rows}"


def plan(
    there: torch.Tensor,
    at: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    base: torch.Tensor | None = None,
    index: int = 0,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Return the rows: new ones that are read, or those that were given, which are written to the buffer. Options: base and index, where the buffer lies."""
    count, width = len(at), there.shape[-1]
    require_vector("at", at, count)
    if at.dtype != torch.int64:
        raise KernelError(f"at must be int64, got {at.dtype}")
    if there.stride(-1) != 1 and width > 1:
        raise KernelError(f"there must have adjacent elements in a row, got strides {list(there.stride())}")
    writes = rows is not None
    if rows is None:
        rows = torch.empty(count, width, dtype=there.dtype, device=there.device)
    if rows.shape != (count, width) or rows.dtype != there.dtype or not rows.is_contiguous():
        raise KernelError(
            f"rows must be a dense {there.dtype} [{count}, {width}], got {rows.dtype} {list(rows.shape)} with strides {list(rows.stride())}"
        )
    arch, config = KERNEL.settle(CopyShape(count, width, writes), there, arch, config)
    word = WORDS[there.element_size()]
    return Plan(
        kernel=copy_rows_kernel,
        grid=(cdiv(count, config.block_m), cdiv(width, config.block_n)),
        arguments={
            "there_ptr": there.view(word),
            "base_ptr": base,
            "index": index,
            "at_ptr": at,
            "rows_ptr": rows.view(word),
            "ROWS": count,
            "WIDTH": width,
        },
        constants={
            "WRITES": writes,
            **config.blocks("mn"),
            "PDL": overlaps(arch),
        },
        config=config,
        output=rows,
    )


def example(shape: CopyShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make = empties(dtype, device)
    given = (make(shape.rows, shape.width), make(shape.rows, kind="int64"))
    return (*given, make(shape.rows, shape.width)) if shape.writes else given, {}


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shape_for=lambda shape, config: replace(shape, width=config.block_n),
    typical=CopyShape(8192, 128),
)
