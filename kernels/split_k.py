# SPDX-License-Identifier: Apache-2.0
"""Sum the partial products of blocks that share an output tile, in a fixed order.

Every block writes its float32 tile to a workspace and counts itself in; whichever comes last adds all of them in the
order of K, so the result is the same bit for bit however the blocks were scheduled, and sets the count back to zero for
the next launch. No second kernel and no floating-point atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import Config, Kernel, KernelError, Plan, holding, is_divisible
from nnfront_kernels.dependent import let_next_start, lines_ahead, overlaps
from nnfront_kernels.epilogue import Epilogue, write_tile
from nnfront_kernels.row_norm import divided, normalised, require_norm
from nnfront_kernels.tiles import MatmulShape, bucket, cdiv
from nnfront_kernels.walk import tile_at


class Workspace(NamedTuple):
    """`partial` may hold anything; `arrived` is zero before and after a launch. One per stream."""

    partial: torch.Tensor  # float32
    arrived: torch.Tensor  # int32, one for each output tile


class Sizes(NamedTuple):
    """How many elements a launch needs of a workspace's tensors."""

    partial: int
    arrived: int


Lender: TypeAlias = Callable[[Sizes, torch.device], Workspace]


def allocated(sizes: Sizes, device: torch.device) -> Workspace:
    """A workspace for one launch, or for many in a row."""
    return Workspace(
        torch.empty(sizes.partial, dtype=torch.float32, device=device),
        torch.zeros(sizes.arrived, dtype=torch.int32, device=device),
    )


_LENDER: ContextVar[Lender] = ContextVar("lender", default=allocated)


def lending(lender: Lender) -> AbstractContextManager[None]:
    """Inside of this, in this thread, launches that are given no workspace have this lender's, which may be the same for all of one stream."""
    return holding(_LENDER, lender)


def lender() -> Lender:
    """Who lends workspaces in this thread."""
    return _LENDER.get()


def needed(config: Config, m: int, n: int, *, squares: bool = False) -> Sizes | None:
    """What a launch with this config needs, one that also sums squares of rows or not, or None if no tile is shared."""
    if config.split_k == 1:
        return None
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    rows = max(config.block_m, 16) if squares else 0  # so that each part begins where wide stores may
    return Sizes(tiles * config.split_k * (config.block_m * config.block_n + rows), tiles)


def pointers(
    given: Workspace | None, sizes: Sizes | None, device: torch.device
) -> dict[str, torch.Tensor | None]:
    """The kernel's two workspace arguments; KernelError if the caller's workspace is too small."""
    if sizes is None:
        return {"partial_ptr": None, "arrived_ptr": None}
    if given is None:
        given = lender()(sizes, device)
    if given.partial.numel() < sizes.partial or given.arrived.numel() < sizes.arrived:
        raise KernelError(
            f"workspace must hold {sizes.partial} partial sums and {sizes.arrived} counts, "
            f"got {given.partial.numel()} and {given.arrived.numel()}"
        )
    return {"partial_ptr": given.partial, "arrived_ptr": given.arrived}


@dataclass(frozen=True)
class Options(Epilogue):
    """What the kernels that end in `finish_product` take besides operands: rows of x that are normalised first, where y and partial sums go, whether
    no launch writes the weight: some of such a one is fetched before earlier launches have ended; and for which arch and with which config.
    """

    out: torch.Tensor | None = None
    workspace: Workspace | None = None
    norm_eps: float | None = None
    norm_weight: torch.Tensor | None = None
    constant_weights: bool = False
    arch: str | None = None
    config: Config | None = None


def reference(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    norm_eps: float | None = None,
    norm_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
    **epilogue: Any,
) -> torch.Tensor:
    """The definition of such a kernel, in float32 or in `compute`, of a weight as it is when it is decoded. Takes what `launch` takes."""
    product = normalised(x.to(compute), norm_eps, norm_weight) @ w.to(compute).T
    y = Epilogue(**epilogue).reference(product, x.dtype)
    return y if out is None else out.copy_(y)


def plan_product(
    kernel: Kernel,
    function: Any,
    x: torch.Tensor,
    w: torch.Tensor,
    given: dict[str, Any],
    *,
    bits: int,
    weights: dict[str, Any],
    constants: Callable[[str, Config], dict[str, Any]],
    **facts: Any,
) -> Plan:
    """The launch of a matmul kernel that ends in `finish_product`: a grid of columns, rows and splits.

    `given` are `Options`; `weights` and `constants`, of an arch and a config, the arguments that only this kernel has; `bits` those of an element of the
    weight; `facts` what its shape says besides.
    """
    options, (m, k), n = Options(**given), x.shape, w.shape[0]
    require_norm(options.norm_eps, options.norm_weight, k)
    loads = {"x_ptr": x, "w_ptr": w, "K": k, "stride_xm": x.stride(0), "stride_wn": w.stride(0)}
    aligned, normed = all(map(is_divisible, loads.values())), options.norm_eps is not None
    shape = MatmulShape(m, n, k, gated=options.gated, aligned=aligned, norm=normed, **facts)
    arch, config = kernel.settle(shape, x, options.arch, options.config)
    options.check(m, n)
    y = options.output(options.out, x, n)
    # In 8 bits rows are normalised where they are rounded.
    norm = {} if x.element_size() == 1 else {"norm_ptr": options.norm_weight, "norm_eps": options.norm_eps}
    return Plan(
        kernel=function,
        grid=(cdiv(n, config.block_n), cdiv(m, config.block_m), config.split_k),
        arguments={
            **loads,
            **weights,
            **norm,
            **options.arguments(y),
            **pointers(options.workspace, needed(config, m, n, squares=normed), x.device),
            "M": m,
            "N": n,
        },
        constants={
            **config.blocks("mn"),
            # More rows than a tile has take the tallest.
            "GROUP_M": 8 if kernel.configs[arch][-1].block_m <= config.block_m < bucket(m) else 1,
            **constants(arch, config),
            **options.constants(),
            "PDL": overlaps(arch),
            "FETCH": lines_ahead(config, bits if options.constant_weights else 0, arch),
        },
        config=config,
        output=y,
        divisible=tuple(loads) if aligned else (),
    )


def depth(k: int, config: Config) -> dict[str, Any]:
    """The constants of a kernel whose steps along K have the config's size."""
    return {"BLOCK_K": config.block_k, "EVEN_K": k % config.block_k == 0}


@triton.jit
def tile_of_block(GROUP_M: tl.constexpr):
    """The row and the column of a block's tile."""
    pid_m, pid_n, num_n = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    if GROUP_M > 1:
        pid_m, pid_n = tile_at(pid_m * num_n + pid_n, tl.num_programs(1), num_n, GROUP_M)
    return pid_m, pid_n


@triton.jit
def part_of_block(M, N, steps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The rows and columns of a block's tile, which of them there are, and its equal part of the steps along K: from the first to before the second."""
    pid_m, pid_n = tile_of_block(GROUP_M)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.cdiv(steps, tl.num_programs(2))
    first = tl.program_id(2) * depth
    return offs_m, offs_n, offs_m < M, offs_n < N, first, tl.minimum(first + depth, steps)


@triton.jit
def finish_product(
    acc,  # [BLOCK_M, BLOCK_N] float32
    squares,  # [BLOCK_M, ...] float32 of rows that are normalised, or None
    partial_ptr,
    arrived_ptr,
    y_ptr,
    bias_ptr,
    residual_ptr,
    scale,
    norm_eps,
    M,
    N,
    K,
    stride_ym,
    stride_rm,
    inside_m,  # [BLOCK_M]: rows that there are
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """What follows the loop over K: sums over all splits, in the block that came last, the norm of rows, and the epilogue."""
    let_next_start(PDL)
    pid_m, pid_n = tile_of_block(GROUP_M)
    num_splits = tl.num_programs(2)
    if squares is not None:
        squares = tl.sum(squares, axis=1)
    last = True
    if partial_ptr is not None:
        tile = pid_m * tl.num_programs(0) + pid_n
        acc, last = sum_splits(
            acc, squares, partial_ptr, arrived_ptr, tile, tl.program_id(2), num_splits, inside_m[:, None], BLOCK_M, BLOCK_N
        )  # fmt: skip
    if last:
        if squares is not None:
            if partial_ptr is not None:
                squares = summed_squares(partial_ptr, tile, num_splits, BLOCK_M, BLOCK_N)
            acc = divided(acc, squares, K, norm_eps)
        write_tile(
            acc, y_ptr, bias_ptr, residual_ptr, scale, pid_m * BLOCK_M, pid_n * BLOCK_N,
            M, N, stride_ym, stride_rm, ACTIVATION, GATED, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def sum_splits(
    acc,  # [BLOCK_M, BLOCK_N] float32
    squares,  # [BLOCK_M] float32, or None
    partial_ptr,
    arrived_ptr,
    tile,
    split,
    num_splits,
    inside_m,  # [BLOCK_M, 1]: rows that there are; others are neither written nor read
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The sum over all splits and True in the block that came last; anything and False in the others. Squares are left where `summed_squares` finds them."""
    ROWS: tl.constexpr = 0 if squares is None else (BLOCK_M if BLOCK_M > 16 else 16)
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N + ROWS
    offsets = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tile_ptrs = partial_ptr + tile.to(tl.int64) * num_splits * SIZE + offsets
    tl.store(tile_ptrs + split * SIZE, acc, mask=inside_m)
    if squares is not None:
        rows = partial_ptr + tile.to(tl.int64) * num_splits * SIZE + BLOCK_M * BLOCK_N + tl.arange(0, BLOCK_M)
        tl.store(rows + split * SIZE, squares)
    # The atomic is issued by one thread: all threads of the block must have written before it.
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == num_splits - 1
    if last:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for s in range(0, num_splits):
            # Other SMs wrote it: not from this one's L1.
            acc += tl.load(tile_ptrs + s * SIZE, mask=inside_m, other=0.0, cache_modifier=".cg")
        tl.store(arrived_ptr + tile, 0)
    return acc, last


@triton.jit
def summed_squares(partial_ptr, tile, num_splits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The squares of rows [BLOCK_M] over all splits, for the block that came last."""
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N + (BLOCK_M if BLOCK_M > 16 else 16)
    rows = partial_ptr + tile.to(tl.int64) * num_splits * SIZE + BLOCK_M * BLOCK_N + tl.arange(0, BLOCK_M)
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for s in range(0, num_splits):
        squares += tl.load(rows + s * SIZE, cache_modifier=".cg")
    return squares
