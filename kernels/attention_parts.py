# SPDX-License-Identifier: Apache-2.0
"""How blocks that share a sequence put their parts of an attention row together, in a fixed order.

How many blocks there are is said before a launch, for the longest sequence; how many of them have a part follows from the length on the device. The others
end at once.

A part is a weighted sum of values, the largest score and the sum of exponentials relative to it. The block that arrives
last adds all parts from the first keys to the last, and sets the count back to zero for the next launch.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from nnfront_kernels.attention import padded
from nnfront_kernels.common import Arch, Config
from nnfront_kernels.split_k import Sizes

BLOCKS_PER_SM = 2
STEPS = 4  # a block has at least so many, if it shares a sequence


def parts(blocks: int, block_n: int, longest: int, window: int, arch: Arch) -> int:
    """How many blocks share a sequence: doubled until they fill the SMs, while each has some steps at the longest length of the class."""
    longest = 1 << max(longest - 1, 0).bit_length()
    if window:
        longest = min(longest, window)
    split_k = 1
    while blocks * split_k < BLOCKS_PER_SM * arch.num_sms and 2 * split_k * STEPS * block_n <= longest:
        split_k *= 2
    return min(split_k, 128)


def needed(config: Config, groups: int, size: int) -> Sizes | None:
    """What a launch needs: sums, largest and total of every part of every group of rows."""
    if config.split_k == 1:
        return None
    part = config.block_m * (padded(size) + 2)
    return Sizes(math.prod((groups, config.split_k, part)), groups)


@triton.jit
def sum_parts(
    acc,  # [BLOCK_M, BLOCK_DV]
    largest,
    total,
    partial_ptr,
    arrived_ptr,
    group,
    split,
    active,  # blocks that have steps
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """All parts of a group of rows put together, and True in the block that came last; anything and False in the others."""
    SIZE: tl.constexpr = BLOCK_M * (BLOCK_DV + 2)
    lane = tl.arange(0, BLOCK_M)
    at = lane[:, None] * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :]
    parts = partial_ptr + group.to(tl.int64) * (SPLITS * SIZE)
    rows = parts + BLOCK_M * BLOCK_DV + lane
    tl.store(parts + split * SIZE + at, acc)
    tl.store(rows + split * SIZE, largest)
    tl.store(rows + split * SIZE + BLOCK_M, total)
    # The atomic is issued by one thread: all threads of the block must have written before it.
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr + group, 1, sem="acq_rel", scope="gpu") == active - 1
    if last:
        acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
        largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for s in range(0, active):
            # Other SMs wrote it: not from this one's L1.
            its = tl.load(rows + s * SIZE, cache_modifier=".cg")
            its_total = tl.load(rows + s * SIZE + BLOCK_M, cache_modifier=".cg")
            its_acc = tl.load(parts + s * SIZE + at, cache_modifier=".cg")
            new = tl.maximum(largest, its)
            finite = tl.where(new == float("-inf"), 0.0, new)
            shrink, grow = tl.exp2(largest - finite), tl.exp2(its - finite)
            total = total * shrink + its_total * grow
            acc = acc * shrink[:, None] + its_acc * grow[:, None]
            largest = new
        tl.store(arrived_ptr + group, 0)
    return acc, largest, total, last
