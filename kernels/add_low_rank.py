# SPDX-License-Identifier: Apache-2.0
"""y + (x @ a[adapter].T) @ b[adapter].T: low-rank changes of a product (LoRA), each sequence with its own adapter or none.

Shapes: y and x [rows, N] and [rows, K] 16-bit, or float32, rows adjacent along their last axis; a [adapters, rank, K] and b [adapters, N, rank], dense;
adapter [sequences] int32 or int64, and rows / sequences neighbours are a sequence's. What is no number of an adapter is none: such rows of y stay as they are.
Sums are float32, and y is rounded once. `out` may be y.

Two launches. The first makes rank features of each row, `shrink`, for which blocks share a row along K and are added in order; the second
widens them and adds, `expand`. Features are float32 between the two. Rows without an adapter read nothing but y. How many adapters a batch has is
not looked at by the host: rows alone decide what is launched, so it can be captured.

Source: LoRA (arXiv 2106.09685), section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import (
    ARCHS,
    Config,
    Kernel,
    KernelError,
    Plan,
    arch_of,
    empties,
    require_matrix,
    taking,
)
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.remembered import remembered
from nnfront_kernels.split_k import Workspace, needed, pointers, sum_splits
from nnfront_kernels.tiles import bucket, cdiv

DTYPES = ("float16", "bfloat16", "float32")
MOST_RANK = 256


@dataclass(frozen=True)
class LowRankShape:
    """`rows` of k features and n outputs, in sequences of `seq` rows, and adapters of a rank."""

    rows: int
    n: int
    k: int
    rank: int
    adapters: int = 4
    seq: int = 1


def reference(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    adapter: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`, row by row."""
    made = y.to(compute).clone()
    seq = len(x) // max(len(adapter), 1)
    for row in range(len(x)):
        number = int(adapter[row // seq])
        if 0 <= number < len(a):
            made[row] += b[number].to(compute) @ (a[number].to(compute) @ x[row].to(compute))
    return made.to(y.dtype)


# block_m features of the rank and block_k of x in a step of the first launch; block_n elements of b in a block of the second. By arithmetic: some tens
# of bytes in flight for each thread; not yet measured.
CONFIGS = (Config(16, 4096, 512, 4, 2),)


def choose(shape: LowRankShape, dtype: str, arch: str) -> Config:
    """The one config, K split until there are two blocks for each SM."""
    (config,) = CONFIGS
    blocks, split_k = bucket(shape.rows) * cdiv(shape.rank, config.block_m), 1
    while (
        blocks * split_k < 2 * ARCHS[arch].num_sms
        and split_k < 16
        and 4 * split_k * config.block_k <= shape.k
    ):
        split_k *= 2
    return replace(config, split_k=split_k)


@triton.jit(do_not_specialize=["SEQ", "ADAPTERS"])
def shrink_kernel(
    x_ptr,
    a_ptr,
    adapter_ptr,
    hidden_ptr,  # float32 [rows, WIDTH]
    partial_ptr,
    arrived_ptr,
    SEQ,
    ADAPTERS,
    K,
    stride_x,
    stride_an,
    stride_ar,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    row, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    number = tl.load(adapter_ptr + row // SEQ).to(tl.int64)
    if (number >= 0) & (number < ADAPTERS):
        depth = tl.cdiv(tl.cdiv(K, BLOCK_K), num_splits) * BLOCK_K
        end = tl.minimum((split + 1) * depth, K)
        tile = row * tl.num_programs(2) + tl.program_id(2)
        rank = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        lane = tl.arange(0, BLOCK_K)
        x_row = x_ptr + row.to(tl.int64) * stride_x
        a_rows = a_ptr + number * stride_an + (rank * stride_ar)[:, None]
        sums = tl.zeros((BLOCK_R, BLOCK_K), dtype=tl.float32)
        for first in range(split * depth, end, BLOCK_K):
            at = first + lane
            x = tl.load(x_row + at, mask=at < end, other=0.0).to(tl.float32)
            a = tl.load(a_rows + at[None, :], mask=(rank < RANK)[:, None] & (at < end)[None, :], other=0.0)
            sums += a.to(tl.float32) * x[None, :]
        hidden = tl.sum(sums, axis=1)[None, :]
        last = True
        if partial_ptr is not None:
            one = tl.full((1, 1), 1, dtype=tl.int1)
            hidden, last = sum_splits(
                hidden, None, partial_ptr, arrived_ptr, tile, split, num_splits, one, 1, BLOCK_R
            )
        if last:
            tl.store(hidden_ptr + row.to(tl.int64) * WIDTH + rank[None, :], hidden)


@triton.jit(do_not_specialize=["SEQ", "ADAPTERS"])
def expand_kernel(
    y_ptr,
    hidden_ptr,
    b_ptr,
    adapter_ptr,
    out_ptr,
    SEQ,
    ADAPTERS,
    N,
    stride_y,
    stride_bn,
    stride_bo,
    stride_out,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    number = tl.load(adapter_ptr + row // SEQ).to(tl.int64)
    y = tl.load(y_ptr + row.to(tl.int64) * stride_y + at, mask=at < N, other=0.0).to(tl.float32)
    if (number >= 0) & (number < ADAPTERS):
        rank = tl.arange(0, WIDTH)
        hidden = tl.load(hidden_ptr + row.to(tl.int64) * WIDTH + rank, mask=rank < RANK, other=0.0)
        b_rows = b_ptr + number * stride_bn + (at.to(tl.int64) * stride_bo)[:, None]
        b = tl.load(b_rows + rank[None, :], mask=(at < N)[:, None] & (rank < RANK)[None, :], other=0.0)
        y += tl.sum(b.to(tl.float32) * hidden[None, :], axis=1)
    tl.store(out_ptr + row.to(tl.int64) * stride_out + at, y.to(out_ptr.dtype.element_ty), mask=at < N)


@taking(DTYPES)
def accepts(shape: LowRankShape, dtype: str, arch: str) -> str | None:
    if not 1 <= shape.rank <= MOST_RANK:
        return f"the rank must be 1 to {MOST_RANK}, got {shape.rank}"
    if shape.rows >= 2**16:
        return f"there must be less than 65536 rows, got {shape.rows}"
    return None


def require_adapters(
    matrix: torch.Tensor, name: str, shape: tuple[int, int, int], adapter: torch.Tensor, x: torch.Tensor
) -> int:
    """How many rows a sequence has. Raise KernelError unless this is a dense matrix for each adapter, and there is a number for each sequence."""
    if matrix.shape != shape or matrix.dtype != x.dtype or not matrix.is_contiguous():
        raise KernelError(
            f"{name} must be {x.dtype} {list(shape)} and dense, got {matrix.dtype} {list(matrix.shape)} "
            f"with strides {list(matrix.stride())}"
        )
    if adapter.ndim != 1 or adapter.dtype not in (torch.int32, torch.int64) or not adapter.is_contiguous():
        raise KernelError(
            f"adapter must be dense int32 or int64 [sequences], got {adapter.dtype} {list(adapter.shape)}"
        )
    if len(x) % max(len(adapter), 1):
        raise KernelError(f"rows must be a multiple of the {len(adapter)} sequences, got {len(x)}")
    return len(x) // max(len(adapter), 1)


@remembered
def shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    adapter: torch.Tensor,
    n: int,
    *,
    workspace: Workspace | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """The first launch, for n outputs: features [rows, a power of two that holds the rank] of each row."""
    require_matrix("x", x, None, x.shape[-1], None)
    (rows, k), (count, rank) = x.shape, a.shape[:2]
    seq = require_adapters(a, "a", (count, rank, k), adapter, x)
    arch, config = KERNEL.settle(LowRankShape(rows, n, k, rank, count, seq), x, arch, config)
    width = max(triton.next_power_of_2(rank), config.block_m)
    hidden = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    tiles = replace(config, block_m=1, block_n=config.block_m)
    return Plan(
        kernel=shrink_kernel,
        grid=(rows, config.split_k, width // config.block_m),
        arguments={
            "x_ptr": x,
            "a_ptr": a,
            "adapter_ptr": adapter,
            "hidden_ptr": hidden,
            **pointers(workspace, needed(tiles, rows, width), x.device),
            "SEQ": seq,
            "ADAPTERS": count,
            "K": k,
            "stride_x": x.stride(0),
            "stride_an": a.stride(0),
            "stride_ar": a.stride(1),
        },
        constants={
            "RANK": rank,
            "WIDTH": width,
            "BLOCK_R": config.block_m,
            "BLOCK_K": config.block_k,
            "PDL": overlaps(arch),
        },
        config=config,
        output=hidden,
    )


@remembered
def expand(
    y: torch.Tensor,
    hidden: torch.Tensor,
    b: torch.Tensor,
    adapter: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """The second launch, of what the first made."""
    (rows, width), (count, n, rank) = hidden.shape, b.shape
    require_matrix("y", y, rows, n, None)
    seq = require_adapters(b, "b", (count, n, rank), adapter, y)
    out = torch.empty(rows, n, dtype=y.dtype, device=y.device) if out is None else out
    require_matrix("out", out, rows, n, y.dtype)
    arch, config = arch or arch_of(y.device), config or CONFIGS[0]
    block_n = config.block_n // width
    return Plan(
        kernel=expand_kernel,
        grid=(cdiv(n, block_n), rows),
        arguments={
            "y_ptr": y,
            "hidden_ptr": hidden,
            "b_ptr": b,
            "adapter_ptr": adapter,
            "out_ptr": out,
            "SEQ": seq,
            "ADAPTERS": count,
            "N": n,
            "stride_y": y.stride(0),
            "stride_bn": b.stride(0),
            "stride_bo": b.stride(1),
            "stride_out": out.stride(0),
        },
        constants={"RANK": rank, "WIDTH": width, "BLOCK_N": block_n, "PDL": overlaps(arch)},
        config=config,
        output=out,
    )


def plan(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    adapter: torch.Tensor,
    **options: Any,
) -> Plan:
    """The first of the launches, to look at."""
    return shrink(x, a, adapter, y.shape[-1], **options)


def launch(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    adapter: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Return y with the changes of each row's adapter added, in a new tensor or in `out`, which may be y.

    Raises KernelError if an argument does not fit.
    """
    if b.shape[:1] + b.shape[2:] != a.shape[:2] or b.shape[1] != y.shape[-1] or y.dtype != x.dtype:
        raise KernelError(
            f"b must be [{a.shape[0]}, {y.shape[-1]}, {a.shape[1]}] and y {x.dtype}, got {list(b.shape)} and {y.dtype}"
        )
    first = shrink(x, a, adapter, y.shape[-1], workspace=workspace, arch=arch, config=config)
    hidden = first.launch()
    return expand(y, hidden, b, adapter, out=out, arch=arch, config=first.config).launch()


def example(shape: LowRankShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make = empties(dtype, device)
    tensors = (
        make(shape.rows, shape.n),
        make(shape.rows, shape.k),
        make(shape.adapters, shape.rank, shape.k),
        make(shape.adapters, shape.n, shape.rank),
        torch.zeros(cdiv(shape.rows, shape.seq), dtype=torch.int32, device=device),
    )
    return tensors, {}


KERNEL = Kernel.of(
    globals(),
    shared_bytes=lambda config: 4 * config.block_k,
    typical=LowRankShape(16, 4096, 4096, 16),
)
