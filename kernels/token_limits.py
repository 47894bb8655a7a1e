# SPDX-License-Identifier: Apache-2.0
"""Which tokens top_k, top_p and min_p keep, and the draw among them, by one block and without a sort; and the draw among all tokens.

Tokens that no bound excludes are gathered, in order. The k-th largest z, and the one at which the likeliest hold p, are found bit by
bit: 32 times the block adds up what lies from some z on. Sums are in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from nnfront_kernels.philox import bits_of_block, bits_of_tokens, exponential


@triton.jit
def load_scores(logits, seen, at, VOCAB, penalty, temperature):
    """z of a block of tokens, or s if there is no temperature; -inf outside."""
    inside = at < VOCAB
    s = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    if seen is not None:
        known = tl.load(seen + at, mask=inside, other=0) != 0
        factor = tl.full(s.shape, 1.0, dtype=tl.float32) * penalty
        s = tl.where(known, tl.where(s < 0, s * factor, tl.div_rn(s, factor)), s)
    if temperature is not None:
        s = tl.div_rn(s, tl.full(s.shape, 1.0, dtype=tl.float32) * temperature)
    return s


@triton.jit
def best_of_lanes(logits, seen, begin, VOCAB, penalty, temperature, BLOCK: tl.constexpr):
    """Of every BLOCK-th token from `begin` to VOCAB the largest z and the first token that has it. A NaN stays: nothing is greater."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    token = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(begin, VOCAB, BLOCK):
        z = load_scores(logits, seen, first + lane, VOCAB, penalty, temperature)
        better = (z > best) | (z != z)
        best = tl.where(better, z, best)
        token = tl.where(better, first + lane, token)
    return best, token


@triton.jit
def draw(logits, seen, top, seed, step, begin, VOCAB, penalty, temperature, BLOCK: tl.constexpr):
    """The chance of the token that wins among those from `begin` to VOCAB, and the token."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -1.0, dtype=tl.float32)
    token = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(begin, VOCAB, BLOCK):
        z = load_scores(logits, seen, first + lane, VOCAB, penalty, temperature)
        weight = tl.exp(z - top)
        chance = tl.where(
            first + lane < VOCAB, weight / exponential(bits_of_block(seed, step, first, BLOCK)), -1.0
        )
        better = chance > best
        best = tl.where(better, chance, best)
        token = tl.where(better, first + lane, token)
    greatest = tl.max(best, axis=0)
    return greatest, tl.min(tl.where(best == greatest, token, VOCAB), axis=0)


@triton.jit
def value_of(key):
    """Floats in the order of unsigned integers: -inf up to a certain one, then all floats, NaN from another on."""
    bits = tl.where(key >= 0x80000000, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return tl.where(key <= 0x007FFFFF, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def gather(
    logits, seen, scores, ids, kept, top, low, begin, VOCAB, penalty, temperature, BLOCK: tl.constexpr
):
    """Write down the tokens from `begin` to VOCAB with at least z = `low`, in order: how many they are, and the weight of all tokens."""
    lane = tl.arange(0, BLOCK)
    count = 0
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(begin, VOCAB, BLOCK):
        at = first + lane
        z = load_scores(logits, seen, at, VOCAB, penalty, temperature)
        total += tl.exp(z - top)
        chosen = (at < VOCAB) & (z >= low)
        place = count + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(scores + place, z, mask=chosen)
        tl.store(ids + place, at, mask=chosen)
        count += tl.sum(chosen.to(tl.int32), axis=0)
        if kept is not None:
            tl.store(kept + at, tl.zeros((BLOCK,), dtype=tl.uint8), mask=at < VOCAB)
    # Other threads of the block read what was written.
    tl.debug_barrier()
    return count, tl.sum(total, axis=0)


@triton.jit
def amount(scores, count, ROOM, top, low, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """How many gathered tokens have at least z = `low`, or with WEIGHTS how much they weigh."""
    lane = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, count, BLOCK):
        # A multiple of 16 in the mask keeps loads wide; what lies behind the tokens is not looked at.
        z = tl.load(scores + first + lane, mask=first + lane < ROOM, other=0.0)
        z = tl.where(first + lane < count, z, float("nan"))
        worth = tl.exp(z - top) if WEIGHTS else 1.0
        found += tl.where(z >= low, worth, 0.0)
    return tl.sum(found, axis=0)


@triton.jit
def largest(scores, count, ROOM, top, target, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """The key of the largest z from which on there is an `amount` of at least the target; 0 if there is not so much.

    Bit by bit. A NaN, which the greatest keys stand for, is less than nothing: there is no z from it on.
    """
    found = tl.full((), 0, dtype=tl.uint32)
    bit = tl.full((), 0x80000000, dtype=tl.uint32)
    for _ in range(32):
        key = found | bit
        total = amount(scores, count, ROOM, top, value_of(key), WEIGHTS, BLOCK)
        found = tl.where(total >= target, key, found)
        bit = bit >> 1
    return found


@triton.jit
def draw_filtered(
    scores, ids, kept, count, ROOM, top, total, seed, step, top_k, top_p, min_p, VOCAB, BLOCK: tl.constexpr
):
    """The token that wins among those gathered that top_k, top_p and min_p keep."""
    low = top - float("inf")
    target = total
    above = total
    if top_k is not None:
        low = value_of(largest(scores, count, ROOM, top, top_k.to(tl.float32), False, BLOCK))
        total = amount(scores, count, ROOM, top, low, True, BLOCK)
    if top_p is not None:
        target = total * top_p
        # All that top_k keeps reaches the target, so the edge is not below what it keeps.
        edge = largest(scores, count, ROOM, top, target, True, BLOCK)
        low = tl.maximum(low, value_of(edge))
        above = amount(scores, count, ROOM, top, value_of(edge + 1), True, BLOCK)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -1.0, dtype=tl.float32)
    token = tl.zeros((BLOCK,), dtype=tl.int32)
    equals = 0
    for first in range(0, count, BLOCK):
        inside = first + lane < count
        z = tl.load(scores + first + lane, mask=first + lane < ROOM, other=0.0)
        at = tl.load(ids + first + lane, mask=first + lane < ROOM, other=0)
        z = tl.where(inside, z, float("nan"))
        inside = z >= low
        weight = tl.exp(z - top)
        if top_p is not None:
            # Equals on the edge: as many as are needed, in order.
            equal = ((z == low) & inside).to(tl.int32)
            rank = equals + tl.cumsum(equal, axis=0) - equal
            inside = inside & ((equal == 0) | (above + rank.to(tl.float32) * weight < target))
            equals += tl.sum(equal, axis=0)
        if min_p is not None:
            inside = inside & (weight >= min_p)
        if kept is not None:
            tl.store(kept + at, tl.full((BLOCK,), 1, dtype=tl.uint8), mask=inside & (weight > 0))
        chance = tl.where(inside, weight / exponential(bits_of_tokens(seed, step, at)), -1.0)
        better = chance > best
        best = tl.where(better, chance, best)
        token = tl.where(better, at, token)
    return tl.min(tl.where(best == tl.max(best, axis=0), token, VOCAB), axis=0)
