# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are a function of a seed, a step and a token: Philox-4x32-10 with the seed as key.

The counter is (token // 4, low and high half of the step, 0), and token % 4 says which of the four results it is. Nothing is
shared between threads, blocks or launches, so numbers do not depend on how work is divided.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), table 2 and its Philox4x32 constants.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
ROUNDS = 10


@triton.jit
def bits_of_tokens(seed, step, token):
    """32 random bits for each token."""
    a, b, c, d = four_words(seed, step, token // 4)
    left = tl.where(token % 2 == 0, a, b)
    right = tl.where(token % 2 == 0, c, d)
    return tl.where(token % 4 < 2, left, right)


@triton.jit
def bits_of_block(seed, step, first, BLOCK: tl.constexpr):
    """The same for BLOCK tokens from `first` on, a multiple of 4: a quarter of the work."""
    a, b, c, d = four_words(seed, step, first // 4 + tl.arange(0, BLOCK // 4))
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))


@triton.jit
def four_words(seed, step, index):
    index = index.to(tl.uint32)
    zero = tl.zeros(index.shape, dtype=tl.uint32)
    return tl.philox(seed, index, zero + step.to(tl.uint32), zero + (step >> 32).to(tl.uint32), zero, 10)


@triton.jit
def exponential(bits):
    """Exponentially distributed numbers of mean 1: -log(1 - v), v = (bits + 1/2) / 2^32 in (0, 1), precise at both ends."""
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    # Not ~bits: the interpreter of Triton 3.6 has none for unsigned numbers.
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # 1 - v has lost the digits of a small v: there the series of the logarithm.
    series = v * (1.0 + v * (0.5 + v * (0.3333333333 + v * 0.25)))
    return tl.where(v < 0.01, series, -tl.log(rest))


def words(state: torch.Tensor, tokens: int) -> torch.Tensor:
    """The bits in torch: state int64 [rows, 2] (seed, step) to int64 [rows, tokens] in [0, 2^32)."""
    seed, step = state[:, :1], state[:, 1:]
    index = torch.arange(-(-tokens // 4), device=state.device).expand(len(state), -1)
    counter = [index, (step & MASK).expand_as(index), (step >> 32 & MASK).expand_as(index), index * 0]
    keys = [seed & MASK, seed >> 32 & MASK]
    for _ in range(ROUNDS):
        # The product of two 32-bit numbers wraps around in int64, but its bits are right.
        low, high = (counter[2 * i] * MULTIPLIERS[i] for i in range(2))
        counter = [
            (high >> 32 & MASK) ^ counter[1] ^ keys[0],
            high & MASK,
            (low >> 32 & MASK) ^ counter[3] ^ keys[1],
            low & MASK,
        ]
        keys = [(key + weyl) & MASK for key, weyl in zip(keys, WEYL, strict=True)]
    return torch.stack(counter, -1).flatten(1)[:, :tokens]


def exponentials(state: torch.Tensor, tokens: int) -> torch.Tensor:
    """What `exponential` makes of the bits, in float64 [rows, tokens]."""
    return -torch.log1p(-(words(state, tokens).double() + 0.5) / 2**32)
