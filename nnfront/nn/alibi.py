# SPDX-License-Identifier: Apache-2.0
"""Attention with linear biases (ALiBi): a number for each key that grows with its position, by a slope of each head's own."""

from __future__ import annotations

import math

import torch

from nnfront.nn.cache import Cache
from nnfront.nn.causal_lm import NoCache
from nnfront.nn.functional import op
from nnfront.nn.module import Module
from nnfront.nn.tensor import Tensor


class ALiBi(Module):
    """What is added to scores: slope * position of the key, which differs from slope * distance by the same number for all keys of a query.

    `highest`: the exponent of the smallest slope. Source: ALiBi (arXiv 2108.12409), section 3; heads that are no power of two as in its code.
    """

    def __init__(self, heads: int, highest: int = 8) -> None:
        count = 2 ** math.ceil(math.log2(heads))
        exponents = torch.arange(1, count + 1) * (highest / count)
        if count > heads:  # those of half as many heads, then what lies between
            exponents = torch.cat([exponents[1::2], exponents[::2]])[:heads]
        self.slopes = torch.pow(2.0, -exponents)

    def forward(self, tokens: Tensor, cache: Cache | NoCache) -> Tensor:
        """Tokens [batch, seq] to float32 [1, heads, 1, positions], of as many positions as the cache has, or tokens without one."""
        layer = cache[0]
        positions = op.arange(tokens.shape[1] if layer is None else layer.type.max_seq, dtype="float32")
        return op.reshape(self.slopes, (1, len(self.slopes), 1, 1)) * positions
