# SPDX-License-Identifier: Apache-2.0
"""What encoders of text share: the spec of their methods, and the mean that most embeddings of sentences are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nnfront.dims import Dim
from nnfront.nn import spec
from nnfront.nn.functional import op
from nnfront.nn.tensor import Tensor


def mean_of_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over a text's tokens, those where `mask` [batch, seq] is 1: [batch, seq, size] to float32 [batch, size], 0 where there is none."""
    weight = op.unsqueeze(op.astype(mask, "float32"), 2)
    sums = op.sum(op.astype(x, "float32") * weight, 1)
    return sums / op.maximum(op.sum(weight, 1), 1.0)


def encoder_spec(
    methods: Iterable[str], max_positions: int, arguments: Iterable[str] = ("tokens", "mask")
) -> dict[str, Any]:
    """Return the spec of methods that all take the same integers [batch, seq], of up to `max_positions` tokens of a text."""
    batch, seq = Dim("batch", min=1), Dim("seq", min=1, max=max_positions)
    taken = {name: spec.Tensor([batch, seq], "int64") for name in arguments}
    return {method: taken for method in methods}
