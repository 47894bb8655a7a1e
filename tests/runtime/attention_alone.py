# SPDX-License-Identifier: Apache-2.0
"""Attention by the kernels in C alone, by themselves: None for what they are not for, with nothing changed. And how near it is to what is expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from hypothesis import strategies as st

from nnfront.backends.cpu.decode_attention import Scores
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.in_c import in_c
from nnfront.backends.cpu.tape_attention import write_attention, write_qkv_attention
from nnfront.backends.cpu.tape_builder import Write
from nnfront.lower import Run, Structure
from nnfront.state.layer import CacheLayer


def _alone(write: Write, scores: Scores, **attrs: Any) -> Callable[..., Any]:
    pair = Structure(fields=(Structure(0), Structure(1)))
    known = {name: value for name, value in asdict(scores).items() if value is not None}
    return in_c(write, lambda run: lambda *operands: (None, None))(
        Run("attention", "attention", (), pair, {**known, **attrs})
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    layer: CacheLayer,
    scores: Scores,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Store the tokens k and v and attend from q [batch, seq, heads, size]."""
    y: torch.Tensor | None = _alone(write_attention, scores)(q, k, v, layer, sinks, bias)[0]
    return y


def attend_rotated(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    groups: int,
    layer: CacheLayer,
    scores: Scores,
    *,
    is_interleaved: bool = False,
) -> torch.Tensor | None:
    """The same for a fused projection [batch, seq, (heads + 2 * groups) * size], q and k rotated before."""
    attrs = {"heads": heads, "groups": groups, "interleaved": is_interleaved}
    y: torch.Tensor | None = _alone(write_qkv_attention, scores, **attrs)(qkv, cos, sin, layer, None)[0]
    return y


def biases(data: st.DataObject, batch: int, heads: int, positions: int) -> torch.Tensor | None:
    """A bias of some dtype, of one or all sequences and heads, or none."""
    kind = data.draw(st.sampled_from([None, torch.float32, torch.bfloat16, torch.bool]))
    shape = data.draw(st.sampled_from([1, batch])), data.draw(st.sampled_from([1, heads])), 1, positions
    if kind is None:
        return None
    return torch.rand(shape) < 0.7 if kind == torch.bool else (2 * torch.randn(shape)).to(kind)


def both(values: torch.Tensor) -> torch.Tensor:
    """Values, and the same without signs: what `assert_near` wants to be attended to."""
    return torch.stack((values, values.abs()))


def assert_near(y: torch.Tensor, expected: torch.Tensor, unsigned: torch.Tensor) -> None:
    """The result is rounded; scores and sums are float32. So are weights, which are rounded too where bfloat16 is multiplied in pairs: each is off by a part of
    it, and so is their sum, together by as much of what values without signs give."""
    assert NATIVE is not None
    of_weights = 2**-8 * unsigned if NATIVE.used_set().endswith("bf16") else 0.0
    assert ((y.double() - expected).abs() <= expected.abs() * 2**-8 + of_weights + 8e-6).all()
