# SPDX-License-Identifier: Apache-2.0
"""How the matmul kernels choose a tile: limits and a model of waves. Pure arithmetic, no GPU, nothing is tuned at run time.

A product y[M, N] = x[M, K] @ w[N, K].T runs as a grid of tiles. Blocks that run at the same time form a wave, and a
partly filled last wave costs as much as a full one, so the best tile depends on how the grid divides by the number of
SMs. The model ranks candidates; it predicts no times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from nnfront_kernels.common import ARCHS, REGISTERS, WARP, Arch, Config
from nnfront_kernels.spilled import without_spills


@dataclass(frozen=True)
class MatmulShape:
    """The facts about one matmul that `accepts` and `choose` may look at.

    n counts the rows of the weight: with `gated` the output has n // 2 columns. `aligned` says that K and the row
    strides of x and w are multiples of 16 elements and their pointers of 16 bytes. `group` is the size of a
    quantisation group along K, 0 for none or one per row. With `norm` rows of x are divided by their root mean square first.
    """

    m: int
    n: int
    k: int
    gated: bool = False
    aligned: bool = True
    group: int = 0
    zero_points: bool = False
    norm: bool = False


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def bucket(m: int) -> int:
    """The power of two that stands for `m`, at most 8192: a config never depends on M more finely than this."""
    return min(1 << max(m - 1, 0).bit_length(), 8192)


def shared_bytes(config: Config, x_bits: int, w_bits: int) -> int:
    """Shared memory that the pipelined operands of a tile take, in bytes."""
    return config.num_stages * config.block_k * (config.block_m * x_bits + config.block_n * w_bits) // 8


def accumulators(config: Config, arch: Arch) -> int:
    """Registers per thread that hold the float32 tile."""
    return config.block_m * config.block_n // (config.num_warps * WARP)


def fits(config: Config, arch: Arch, x_bits: int, w_bits: int) -> bool:
    """Whether a config is inside the limits of `arch`: shared memory, and accumulators in half of the registers."""
    return (
        shared_bytes(config, x_bits, w_bits) <= arch.shared_bytes
        and accumulators(config, arch) <= (arch.registers + 1) // 2
    )


def model_seconds(config: Config, shape: MatmulShape, arch: Arch, x_bits: int, w_bits: int) -> float:
    """Waves times the time of one block, plus the traffic of split-K partial sums. Ranks configs, no more."""
    m = bucket(shape.m)
    rows, columns = cdiv(m, config.block_m), cdiv(shape.n, config.block_n)
    blocks = rows * columns * config.split_k
    threads_limit = arch.threads // (config.num_warps * WARP)
    resident = max(
        1, min(threads_limit, arch.shared_bytes_sm // (shared_bytes(config, x_bits, w_bits) + 1024))
    )
    # Two resident blocks hide each other's latency; more of them only share the same units.
    per_wave = arch.num_sms * min(resident, 2)
    waves = cdiv(blocks, per_wave)
    # A short last wave leaves SMs idle but gives each block a whole SM.
    share = min(resident, 2) if blocks > arch.num_sms else 1
    depth = cdiv(shape.k, config.split_k)
    compute = 2 * config.block_m * config.block_n * depth / (arch.flops / arch.num_sms)
    x_bytes, w_bytes = config.block_m * depth * x_bits / 8, config.block_n * depth * w_bits / 8
    # Rows beyond M are masked and cost no traffic; re-read tiles come from L2, taken as three times device memory.
    x_bytes *= min(1.0, m / config.block_m)
    l2 = (x_bytes + w_bytes) / (3 * arch.bandwidth / arch.num_sms)
    device = (shape.n * shape.k * w_bits + m * shape.k * x_bits) / 8 / arch.bandwidth
    partial = 2 * 4 * m * shape.n * config.split_k / arch.bandwidth if config.split_k > 1 else 0.0
    start = 2e-6 if config.split_k == 1 else 3e-6
    times = sorted((waves * share * compute, waves * share * l2, device))
    # Computing and loading overlap, but not fully.
    return times[2] + 0.25 * times[1] + partial + start


def best(candidates: tuple[Config, ...], shape: MatmulShape, arch: str, x_bits: int, w_bits: int) -> Config:
    """The fitting candidate with the lowest modelled time, the earlier where two are equal."""
    gpu = ARCHS[arch]
    inside = [config for config in candidates if fits(config, gpu, x_bits, w_bits)]
    assert inside, f"no config fits {arch}: {candidates}"
    return min(inside, key=lambda config: model_seconds(config, shape, gpu, x_bits, w_bits))


def smallest(
    kernel: str,
    candidates: tuple[Config, ...],
    shape: MatmulShape,
    arch: str,
    shared: Callable[[Config], int],
    w_bits: int,
    norm_registers: int = 0,
) -> Config:
    """The candidate with the fewest rows that hold M, else the last, with K split to fill the GPU. Where there are groups, block_k is the group. Candidates that the installed Triton spills are left out.
    A thread that normalises rows has `norm_registers` at most."""
    m = bucket(shape.m)
    candidates = without_spills(kernel, candidates, arch, group=shape.group, zero_points=shape.zero_points)
    config = next((c for c in candidates if c.block_m >= m), candidates[-1])
    config = replace(config, block_k=shape.group or config.block_k)
    if shape.norm:  # what rows are multiplied by, and their squares, are in registers too
        config = replace(config, registers=max(config.registers, norm_registers))
    return replace(config, split_k=splits(config, shape, ARCHS[arch], shared(config), w_bits))


def resident(config: Config, arch: Arch, shared: int) -> int:
    """How many blocks an SM holds at once: by their registers, which a warp has in pieces of 256, their shared memory and their threads."""
    warp = -(-config.registers * WARP // 256) * 256
    limits = REGISTERS // (warp * config.num_warps), arch.shared_bytes_sm // (shared + 1024)
    return max(1, min(*limits, arch.threads // (config.num_warps * WARP)))


MOST_SPLITS = 32
LATENCY = 1e-6  # of device memory under load, seconds
ENDS = 3  # what a wave costs before its first step and after its last, in steps


def splits(config: Config, shape: MatmulShape, arch: Arch, shared: int, w_bits: int) -> int:
    """How many blocks share a tile: where the SM with the most blocks has the fewest steps, counting what waves and partial sums cost.

    Blocks that an SM holds at once share its part of the bandwidth, so its steps count one after another; with fewer blocks than it takes to hide
    the latency of memory a step takes as long as with so many. Each block has two steps at least.
    """
    m = bucket(shape.m)
    tiles = cdiv(m, config.block_m) * cdiv(shape.n, config.block_n)
    steps, held = cdiv(shape.k, config.block_k), resident(config, arch, shared)
    step = config.block_k * config.block_n * w_bits / 8 * arch.num_sms  # bytes that all SMs read in a step
    ahead = max(config.num_stages - 1, 1) * step
    busy = min(held, max(2, math.ceil(arch.bandwidth * LATENCY / ahead)))

    def cost(split_k: int) -> float:
        blocks = tiles * split_k
        waves = cdiv(blocks, held * arch.num_sms)
        sums = 2 * 4 * m * shape.n * split_k / step if split_k > 1 else 0.0  # written and read
        return max(cdiv(blocks, arch.num_sms), busy) * cdiv(steps, split_k) + ENDS * waves + sums

    return min(range(1, max(min(steps // 2, MOST_SPLITS), 1) + 1), key=cost)
