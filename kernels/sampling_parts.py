# SPDX-License-Identifier: Apache-2.0
"""Draw one token for each row of logits as `sampling.py` does, each row by several blocks: for vocabularies that take one block long.

Definition, shapes and numbers are those of `sampling.py`; they depend on nothing but the row. Tokens are the same but where the sum of all
weights, which is added up part by part here, rounds otherwise: then a token on the edge of top_p may be kept by one and not by the other.

    first launch    the largest z of each part; the likeliest token alone is found by the block of a row that comes last
    second launch   each part gathers its tokens that no bound excludes, or finds the one of its own that wins; the block that comes last joins what the
                    parts have, in order, and draws

How many parts a row has depends on the vocabulary alone: a row is drawn from in the same way in any batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels import sampling
from nnfront_kernels.common import Config, Kernel, Plan, require_matrix
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.sampling import Draw, SampleShape, Workspace, with_room
from nnfront_kernels.split_k import Sizes, pointers
from nnfront_kernels.tiles import cdiv
from nnfront_kernels.token_limits import best_of_lanes, draw, draw_filtered, gather, largest, value_of

# Parts of a row and tokens of a step of one; a bound for top_k is found among the best of LANES groups of each part. By arithmetic; not yet measured.
CONFIGS = (Config(1, 1024, 1, 8, 1, split_k=32),)
LANES = 64
LEAST = 1 << 14  # tokens from which on a row is worth two launches

reference, accepts = sampling.reference, sampling.accepts
DTYPES, example = sampling.DTYPES, sampling.example


def part_size(vocab: int, config: Config) -> int:
    """Tokens of a part, whole steps."""
    return cdiv(cdiv(vocab, config.block_n), config.split_k) * config.block_n


def workspace(rows: int, vocab: int, device: torch.device, config: Config = CONFIGS[0]) -> Workspace:
    """What launches with top_k, top_p or min_p need."""
    return with_room(None, rows, config.split_k * part_size(vocab, config), device)


@triton.jit
def top_of_row(tops, PARTS: tl.constexpr):
    """The largest z of a row, and whether one is NaN."""
    found = tl.load(tops + tl.arange(0, PARTS), cache_modifier=".cg")
    return tl.max(tl.where(found == found, found, float("-inf")), axis=0), tl.max(
        (found != found).to(tl.int32), axis=0
    ) > 0


@triton.jit
def finish(winner, token, state, seen, temperature, ADVANCE: tl.constexpr):
    """Write down the token of a row, count the step and mark the token."""
    tl.store(token, winner.to(tl.int64))
    if ADVANCE:
        if temperature is not None:
            tl.store(state + 1, tl.load(state + 1) + 1)
        if seen is not None:
            tl.store(seen + winner, 1, mask=winner >= 0)


@triton.jit
def largest_in_parts_kernel(
    logits_ptr,
    token_ptr,
    seen_ptr,  # uint8
    tops_ptr,  # float32 [rows, PARTS]
    firsts_ptr,  # int32 [rows, PARTS]: where the largest z of a part is; None if a token is drawn
    lanes_ptr,  # float32 [rows, PARTS, LANES]
    partial_ptr,
    arrived_ptr,
    VOCAB,
    SIZE,
    stride_l,
    stride_seen,
    penalty,
    temperature,
    ADVANCE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seen = None
    if seen_ptr is not None:
        seen = seen_ptr + row * stride_seen
    begin = part * SIZE
    best, token = best_of_lanes(
        logits_ptr + row * stride_l, seen, begin, tl.minimum(begin + SIZE, VOCAB), penalty, temperature, BLOCK
    )
    top = tl.max(best, axis=0)
    has_nan = tl.max((best != best).to(tl.int32), axis=0) > 0
    tl.store(tops_ptr + row * PARTS + part, tl.where(has_nan, float("nan"), top))
    if lanes_ptr is not None:
        groups = tl.max(tl.reshape(best, (BLOCK // LANES, LANES)), axis=0)
        tl.store(lanes_ptr + (row * PARTS + part) * LANES + tl.arange(0, LANES), groups)
    if firsts_ptr is not None:
        tl.store(firsts_ptr + row * PARTS + part, tl.min(tl.where(best == top, token, VOCAB), axis=0))
        # The atomic is issued by one thread: all threads of the block must have written before it.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
            top, has_nan = top_of_row(tops_ptr + row * PARTS, PARTS)
            tops = tl.load(tops_ptr + row * PARTS + tl.arange(0, PARTS), cache_modifier=".cg")
            firsts = tl.load(firsts_ptr + row * PARTS + tl.arange(0, PARTS), cache_modifier=".cg")
            winner = tl.min(tl.where(tops == top, firsts, VOCAB), axis=0)
            finish(tl.where(has_nan, -1, winner), token_ptr + row, None, seen, None, ADVANCE)
            tl.store(arrived_ptr + row, 0)


@triton.jit(do_not_specialize=["top_k"])
def draw_in_parts_kernel(
    logits_ptr,
    token_ptr,
    state_ptr,
    seen_ptr,  # uint8
    kept_ptr,  # uint8
    tops_ptr,
    lanes_ptr,
    scores_ptr,  # float32 [rows, ROOM]: a piece for each part
    ids_ptr,
    counts_ptr,  # int32 [rows, PARTS]: how many a part has gathered, or its token that wins
    totals_ptr,  # float32 [rows, PARTS]: the weight of a part, or the chance of this token
    partial_ptr,
    arrived_ptr,
    VOCAB,
    SIZE,
    stride_l,
    stride_seen,
    stride_kept,
    penalty,
    temperature,
    top_k,
    top_p,
    min_p,
    nearest,  # tokens this far below the largest cannot be kept, None if that is not known
    ADVANCE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    FILTERED: tl.constexpr = scores_ptr is not None
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits, state, room = logits_ptr + row * stride_l, state_ptr + 2 * row, PARTS * SIZE
    seen = None
    if seen_ptr is not None:
        seen = seen_ptr + row * stride_seen
    begin = part * SIZE
    end = tl.minimum(begin + SIZE, VOCAB)
    counts, totals = counts_ptr + row * PARTS, totals_ptr + row * PARTS
    top, has_nan = top_of_row(tops_ptr + row * PARTS, PARTS)
    if has_nan | (tl.abs(top) == float("inf")):
        if part == 0:
            finish(tl.full((), -1, dtype=tl.int32), token_ptr + row, state, seen, temperature, ADVANCE)
    else:
        seed, step = tl.load(state), tl.load(state + 1)
        if FILTERED:
            scores, ids = scores_ptr + row * room, ids_ptr + row * room
            kept = None
            if kept_ptr is not None:
                kept = kept_ptr + row * stride_kept
            low = top - float("inf")
            if top_k is not None:
                # Groups hold different tokens, so the k-th largest of them is at most that of all tokens.
                lanes = lanes_ptr + row * PARTS * LANES
                low = value_of(
                    largest(lanes, PARTS * LANES, PARTS * LANES, top, top_k.to(tl.float32), False, BLOCK)
                )
            if nearest is not None:
                low = tl.maximum(low, top + nearest)
            found, total = gather(
                logits, seen, scores + begin, ids + begin, kept, top, low, begin, end, penalty, temperature, BLOCK
            )  # fmt: skip
        else:
            total, found = draw(logits, seen, top, seed, step, begin, end, penalty, temperature, BLOCK)
        tl.store(counts + part, found)
        tl.store(totals + part, total)
        # The atomic is issued by one thread: all threads of the block must have written before it.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
            all_totals = tl.load(totals + tl.arange(0, PARTS), cache_modifier=".cg")
            if FILTERED:
                count = join(scores, ids, counts, SIZE, BLOCK, PARTS)
                winner = draw_filtered(
                    scores, ids, kept, count, room, top, tl.sum(all_totals, axis=0), seed, step, top_k, top_p, min_p, VOCAB, BLOCK
                )  # fmt: skip
            else:
                firsts = tl.load(counts + tl.arange(0, PARTS), cache_modifier=".cg")
                winner = tl.min(tl.where(all_totals == tl.max(all_totals, axis=0), firsts, VOCAB), axis=0)
            finish(winner, token_ptr + row, state, seen, temperature, ADVANCE)
            tl.store(arrived_ptr + row, 0)


@triton.jit
def join(scores, ids, counts, SIZE, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Move what the parts of a row have gathered together, in order: how many tokens that is. Nothing moves behind what is still to be read."""
    lane = tl.arange(0, BLOCK)
    count = tl.load(counts, cache_modifier=".cg")
    for part in range(1, PARTS):
        found = tl.load(counts + part, cache_modifier=".cg")
        for first in range(0, found, BLOCK):
            at, inside = part * SIZE + first + lane, first + lane < found
            z = tl.load(scores + at, mask=inside, other=0.0, cache_modifier=".cg")
            token = tl.load(ids + at, mask=inside, other=0, cache_modifier=".cg")
            tl.debug_barrier()
            tl.store(scores + count + first + lane, z, mask=inside)
            tl.store(ids + count + first + lane, token, mask=inside)
            tl.debug_barrier()
        count += found
    return count


def launches(
    logits: torch.Tensor,
    *,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
    **options: Any,
) -> list[Plan]:
    """Check the arguments of `launch` and describe its launches: one for the likeliest token, else two."""
    require_matrix("logits", logits, None, logits.shape[-1], None)
    (rows, vocab), device = logits.shape, logits.device
    draw = Draw(**options).among(vocab)
    arch, config = KERNEL.settle(draw.shape(logits), logits, arch, config)
    draw.check(logits)
    out = draw.tokens(out, logits)
    parts, size = config.split_k, part_size(vocab, config)

    def made(dtype: torch.dtype, each: int = 1) -> torch.Tensor:
        return torch.empty(rows, parts * each, dtype=dtype, device=device)

    given: dict[str, Any] = {
        **draw.scores(logits, out),
        "tops_ptr": made(torch.float32),
        "lanes_ptr": None if draw.top_k is None else made(torch.float32, LANES),
        "SIZE": size,
        **pointers(None, Sizes(0, rows), device),
    }
    first = Plan(
        kernel=largest_in_parts_kernel,
        grid=(rows, parts),
        arguments={**given, "firsts_ptr": None if draw.draws else made(torch.int32)},
        constants={
            "ADVANCE": draw.advance,
            "BLOCK": config.block_n,
            "LANES": LANES,
            "PARTS": parts,
            "PDL": overlaps(arch),
        },
        config=config,
        output=out,
    )
    if not draw.draws:
        return [first]
    space = with_room(workspace, rows, parts * size, device) if draw.filtered else None
    second = {
        **given,
        **draw.limits(vocab, space),
        "counts_ptr": made(torch.int32),
        "totals_ptr": made(torch.float32),
    }
    return [first, replace(first, kernel=draw_in_parts_kernel, arguments=second)]


def plan(logits: torch.Tensor, **options: Any) -> Plan:
    """The last of the launches, to look at."""
    return launches(logits, **options)[-1]


def launch(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """One token for each row of logits [rows, vocab], int64 [rows]; -1 for a row that has none. Options as for `sampling.launch`.

    Raises KernelError if an argument does not fit.
    """
    *_, token = [each.launch() for each in launches(logits, **options)]
    return token


KERNEL = Kernel.of(
    globals(),
    shared_bytes=lambda config: 8 * config.block_n,
    typical=SampleShape(1, 152064, penalty=True),
)
