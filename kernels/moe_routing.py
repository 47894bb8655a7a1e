# SPDX-License-Identifier: Apache-2.0
"""Sort the tokens of a mixture of experts by expert, on the device, without waiting for the host.

Given the experts [T, top_k] that a router chose, each pair of a token and its choice is a slot, numbered token * top_k +
choice. The result is

    slots [T * top_k] int32        the slots in order of their expert, and of their number within one expert
    tiles [3, num_tiles] int32     for each tile of at most `block_m` of these: expert, first position in `slots`, rows

`num_tiles` is known to the host: no more than T * top_k // block_m + min(experts, T * top_k) can be needed, and the rest
have 0 rows. A tile never holds two experts; a last tile of an expert is short, so nothing is padded. Choices outside of
0 <= expert < experts are left out (an expert that lives elsewhere): then the last entries of `slots` mean nothing.

Three kernels: count each expert in chunks of 128 slots; add up the counts; put each slot in its place. No atomics: the
order is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import Config, Kernel, KernelError, Plan, taking
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.tiles import cdiv

MOST_EXPERTS = 512
MOST_CHOICES = 16
CHUNK = 128
DTYPES = ("int32",)


@dataclass(frozen=True)
class RoutingShape:
    tokens: int
    top_k: int
    experts: int
    block_m: int = 64


class Routing(NamedTuple):
    """What `grouped_matmul` and `moe_combine` read; see the module's docstring."""

    slots: torch.Tensor
    tiles: torch.Tensor
    experts: torch.Tensor  # as given
    block_m: int

    @property
    def top_k(self) -> int:
        return self.experts.shape[1]


class Launches(NamedTuple):
    """The launches of one routing, in order, and their result."""

    plans: tuple[Plan, ...]
    routing: Routing


def most_tiles(tokens: int, top_k: int, experts: int, block_m: int) -> int:
    """How many tiles there can be at most, whatever the choices."""
    return tokens * top_k // block_m + min(experts, tokens * top_k)


def reference(choices: torch.Tensor, num_experts: int, block_m: int) -> tuple[list[int], list[list[int]]]:
    """The definition: the used part of slots, and (expert, first, rows) of each tile with rows."""
    slots: list[int] = []
    tiles = []
    flat = choices.flatten().tolist()
    for expert in range(num_experts):
        mine = [slot for slot, choice in enumerate(flat) if choice == expert]
        for first in range(0, len(mine), block_m):
            tiles.append([expert, len(slots) + first, min(block_m, len(mine) - first)])
        slots += mine
    return slots, tiles


CONFIGS = (Config(1, 1, CHUNK, 8, 1),)  # with fewer warps, comparing a chunk with itself takes all registers


@triton.jit(do_not_specialize=["SLOTS"])
def count_kernel(
    experts_ptr,
    counts_ptr,  # [chunks, E]
    SLOTS,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(experts_ptr + at, mask=at < SLOTS, other=-1)
    for first in tl.static_range(0, E, BLOCK_E):
        expert = first + tl.arange(0, BLOCK_E)
        count = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), axis=0)
        tl.store(counts_ptr + chunk.to(tl.int64) * E + expert, count, mask=expert < E)


@triton.jit(do_not_specialize=["num_chunks"])
def add_up_kernel(
    counts_ptr,  # [chunks, E]
    before_ptr,  # [chunks, E]: how many in the chunks before
    firsts_ptr,  # [E]: position of each expert's first slot
    ends_ptr,  # [E]: number of tiles of the experts up to this one
    totals_ptr,  # [E]
    num_chunks,
    BLOCK_M: tl.constexpr,
    E: tl.constexpr,
    ALL_E: tl.constexpr,  # E, up to a power of two
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    expert = tl.arange(0, ALL_E)
    inside = expert < E
    before = tl.zeros((ALL_E,), dtype=tl.int32)
    for first in range(0, num_chunks, ROWS):
        row = first + tl.arange(0, ROWS)
        offsets = row.to(tl.int64)[:, None] * E + expert[None, :]
        mask = (row < num_chunks)[:, None] & inside[None, :]
        count = tl.load(counts_ptr + offsets, mask=mask, other=0)
        tl.store(before_ptr + offsets, before[None, :] + tl.cumsum(count, axis=0) - count, mask=mask)
        before += tl.sum(count, axis=0)
    tl.store(firsts_ptr + expert, tl.cumsum(before, axis=0) - before, mask=inside)
    tl.store(ends_ptr + expert, tl.cumsum(tl.cdiv(before, BLOCK_M), axis=0), mask=inside)
    tl.store(totals_ptr + expert, before, mask=inside)


@triton.jit(do_not_specialize=["SLOTS", "NUM_TILES"])
def place_kernel(
    experts_ptr,
    before_ptr,
    firsts_ptr,
    ends_ptr,
    totals_ptr,
    slots_ptr,
    tiles_ptr,
    SLOTS,
    NUM_TILES,
    BLOCK_M: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    chunk = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    at = chunk * CHUNK + lane
    chosen = tl.load(experts_ptr + at, mask=at < SLOTS, other=-1)
    used = (chosen >= 0) & (chosen < E)
    earlier = (chosen[:, None] == chosen[None, :]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(earlier.to(tl.int32), axis=1)
    rank += tl.load(before_ptr + chunk.to(tl.int64) * E + chosen, mask=used, other=0)
    tl.store(slots_ptr + tl.load(firsts_ptr + chosen, mask=used, other=0) + rank, at, mask=used)

    # The same blocks fill the table of tiles, CHUNK each: a tile's expert is how many experts end before it.
    expert_of = tl.zeros((CHUNK,), dtype=tl.int32)
    for first in tl.static_range(0, E, BLOCK_E):
        expert = first + tl.arange(0, BLOCK_E)
        end = tl.load(ends_ptr + expert, mask=expert < E, other=2147483647)
        expert_of += tl.sum((end[None, :] <= at[:, None]).to(tl.int32), axis=1)
    wanted = at < NUM_TILES
    real = wanted & (expert_of < E)
    total = tl.load(totals_ptr + expert_of, mask=real, other=0)
    end = tl.load(ends_ptr + expert_of, mask=real, other=0)
    within = (at - (end - tl.cdiv(total, BLOCK_M))) * BLOCK_M
    position = tl.load(firsts_ptr + expert_of, mask=real, other=0) + within
    rows = tl.minimum(total - within, BLOCK_M)
    tl.store(tiles_ptr + at, tl.where(real, expert_of, 0), mask=wanted)
    tl.store(tiles_ptr + NUM_TILES + at, tl.where(real, position, 0), mask=wanted)
    tl.store(tiles_ptr + 2 * NUM_TILES + at, tl.where(real, rows, 0), mask=wanted)


@taking(DTYPES)
def accepts(shape: RoutingShape, dtype: str, arch: str) -> str | None:
    if not 1 <= shape.experts <= MOST_EXPERTS:
        return f"there must be 1 to {MOST_EXPERTS} experts, got {shape.experts}"
    if not 1 <= shape.top_k <= MOST_CHOICES:
        return f"top_k must be 1 to {MOST_CHOICES}, got {shape.top_k}"
    if shape.block_m not in (16, 32, 64, 128):
        return f"block_m must be one of 16, 32, 64, 128, got {shape.block_m}"
    if shape.tokens * shape.top_k >= 2**31 - CHUNK:
        return f"tokens * top_k must fit in int32, got {shape.tokens * shape.top_k}"
    return None


def launches(
    experts: torch.Tensor,
    *,
    num_experts: int,
    block_m: int,
    arch: str | None = None,
    config: Config | None = None,
) -> Launches:
    """Check the arguments of `launch` and describe its launches."""
    if experts.ndim != 2 or not experts.is_contiguous():
        raise KernelError(
            f"experts must be a dense [tokens, top_k], got {list(experts.shape)} with strides {list(experts.stride())}"
        )
    tokens, top_k = experts.shape
    shape = RoutingShape(tokens, top_k, num_experts, block_m)
    arch, config = KERNEL.settle(shape, experts, arch, config)
    num_slots, num_tiles = tokens * top_k, most_tiles(tokens, top_k, num_experts, block_m)
    chunks = cdiv(num_slots, CHUNK)
    all_experts = max(triton.next_power_of_2(num_experts), 2)

    def ints(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=experts.device)

    slots, tiles = ints(num_slots), ints(3, num_tiles)
    counts, before = ints(chunks, num_experts), ints(chunks, num_experts)
    sums = {"firsts_ptr": ints(num_experts), "ends_ptr": ints(num_experts), "totals_ptr": ints(num_experts)}
    waits = {"PDL": overlaps(arch)}
    compare = {"E": num_experts, "BLOCK_E": min(all_experts, 64), "CHUNK": CHUNK, **waits}
    given = {"experts_ptr": experts, "SLOTS": num_slots}
    counting = {**given, "counts_ptr": counts}
    adding = {"counts_ptr": counts, "before_ptr": before, **sums, "num_chunks": chunks}
    placing = {
        **given,
        "before_ptr": before,
        **sums,
        "slots_ptr": slots,
        "tiles_ptr": tiles,
        "NUM_TILES": num_tiles,
    }
    added = {"BLOCK_M": block_m, "E": num_experts, "ALL_E": all_experts, "ROWS": 4096 // all_experts, **waits}
    placed, blocks = {"BLOCK_M": block_m, **compare}, max(chunks, cdiv(num_tiles, CHUNK))
    plans = (
        Plan(count_kernel, (chunks,), counting, compare, config, counts),
        Plan(add_up_kernel, (1,), adding, added, config, before),
        Plan(place_kernel, (blocks,), placing, placed, config, slots),
    )
    return Launches(plans, Routing(slots, tiles, experts, block_m))


def plan(experts: torch.Tensor, **options: Any) -> Plan:
    """The last and largest of the launches."""
    return launches(experts, **options).plans[-1]


def launch(experts: torch.Tensor, *, num_experts: int, block_m: int, **options: Any) -> Routing:
    """Sort the slots of experts [T, top_k] int32. block_m is the config's of the matmuls that will use it.

    Raises KernelError if an argument does not fit.
    """
    made = launches(experts, num_experts=num_experts, block_m=block_m, **options)
    for each in made.plans:
        each.launch()
    return made.routing


def example(shape: RoutingShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    experts = torch.empty(shape.tokens, shape.top_k, dtype=torch.int32, device=device)
    return (experts,), {"num_experts": shape.experts, "block_m": shape.block_m}


KERNEL = Kernel.of(globals(), shared_bytes=lambda config: 64 * 1024, typical=RoutingShape(4096, 8, 128))
