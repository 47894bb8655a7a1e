# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets: a memory of keys and values that each token fades, corrects at its key, and reads at its query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nnfront.dims import Size, product
from nnfront.ir.op import op
from nnfront.ir.types import TensorType, TupleType
from nnfront.ops.recurrent import (
    CHUNK,
    FEW,
    STRICTER,
    decays,
    require_axes,
    require_groups,
    require_shape,
    state_type,
)
from nnfront.ops.rules import require, require_float, wide

# Where each channel of a key fades at its own rate, a chunk has a number for each pair of tokens and channel, so that shorter ones are cheaper.
_CHANNEL_CHUNK = CHUNK // 4
_EPSILON = 1e-6  # of the norm of queries and keys, as in the networks that have one


def _flops(operands: Sequence[TensorType], results: Sequence[TensorType], attrs: Mapping[str, Any]) -> Size:
    """Two operations for each element of the state and token to predict a value, as many to correct it, as many to read."""
    return product([6, operands[0].shape[1], *results[1].shape])


@op(stricter=STRICTER, flops=_flops, dtype_policy="first")
def gated_delta_rule(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    g: TensorType,
    beta: TensorType,
    state: TensorType | None = None,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> TupleType:
    """The gated delta rule, token by token: state = exp(g) * state; state += k (beta * (v - k^T state))^T; y = scale * q^T state.

    Shapes: q and k [batch, seq, groups, key_size], group i for heads i * heads / groups and those after it; v [batch, seq, heads,
    value_size]; g [batch, seq, heads], the log of what a token leaves, not positive, or [batch, seq, heads, key_size], one for each
    channel of the key; beta [batch, seq, heads]; state [batch, heads, key_size, value_size] float32, None for zeros. Returns y
    [batch, seq, heads, value_size] in q's dtype, and the state after the last token, float32. Arithmetic is in float32.
    scale: by default key_size ** -0.5. qk_l2norm: each query and key is divided by the root of its sum of squares + 1e-6.
    Source: Gated Delta Networks (arXiv 2412.06464), section 3; a gate for each channel: Kimi Linear (arXiv 2510.26692), section 3.
    """
    require_float(q, "q")
    require_axes("q", q, 4)
    require_axes("v", v, 4)
    batch, seq, groups, key_size = q.shape
    heads, value_size = v.shape[2:]
    require(not (isinstance(key_size, int) and key_size == 0), "a key has no features")
    require_groups(heads, groups)
    rates = (batch, seq, heads)
    for name, own, shape in (
        ("k", k, q.shape),
        ("v", v, (*rates, value_size)),
        ("g", g, (*rates, key_size) if g.ndim == 4 else rates),
        ("beta", beta, rates),
    ):
        require_shape(name, own, shape)
    y = TensorType((*rates, value_size), q.dtype)
    return TupleType((y, state_type(q, state, (batch, heads, key_size, value_size))))


@gated_delta_rule.reference
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All of it as [batch, groups, heads of a group, tokens, ...]; what fades as [..., 1 or key_size, tokens]."""
    (batch, seq, groups, key_size), (heads, value_size) = q.shape, v.shape[2:]
    dtype, together = wide(q.dtype), (groups, heads // groups if groups else 0)
    if state is None:
        state = q.new_zeros(batch, heads, key_size, value_size, dtype=dtype)
    h = torch.unflatten(state, 1, together)
    queries, keys = (_directed(m.to(dtype), qk_l2norm).transpose(1, 2)[:, :, None] for m in (q, k))
    queries = queries * (key_size**-0.5 if scale is None else scale)
    values = torch.unflatten(v.to(dtype).transpose(1, 2), 1, together)
    rates = torch.unflatten(beta.to(dtype).mT, 1, together)[..., None]
    fade = (g if g.ndim == 4 else g[..., None]).to(dtype).movedim(1, -1)
    fade = torch.unflatten(fade, 1, together)
    y = torch.empty_like(values)
    if seq <= FEW:
        for t in range(seq):
            one = slice(t, t + 1)
            key = keys[..., one, :]
            h = h * fade[..., one].exp()
            h = h.addcmul_(key.mT, rates[..., one, :] * (values[..., one, :] - key @ h))
            y[..., one, :] = queries[..., one, :] @ h
    else:
        length = CHUNK if g.ndim == 3 else _CHANNEL_CHUNK
        for first in range(0, seq, length):
            tokens = slice(first, first + length)
            query, key, rate = queries[..., tokens, :], keys[..., tokens, :], rates[..., tokens, :]
            now, last, between = decays(fade[..., tokens])
            # What a token finds at its key is what was there before the chunk and what the chunk's earlier tokens put there: a triangular system.
            found = _scores(key * rate, key, between)
            wanted = rate * (values[..., tokens, :] - (key * now.mT) @ h)
            change = torch.linalg.solve_triangular(found, wanted, upper=False, unitriangular=True)
            y[..., tokens, :] = (query * now.mT) @ h + _scores(query, key, between) @ change
            h = h * now[..., -1:] + (key * last.mT).mT @ change
    y = y.flatten(1, 2).transpose(1, 2).to(q.dtype).contiguous()
    return y, h.flatten(1, 2) if seq else state.clone()


def _directed(x: torch.Tensor, is_normed: bool) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON) if is_normed else x


def _scores(a: torch.Tensor, b: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """Products of tokens i and j, [..., t, t], their channels weighted by what is left of j at i: [..., 1 or channels, t, t]."""
    if between.shape[-3] == 1:
        return (a @ b.mT) * between[..., 0, :, :]
    return torch.einsum("...ik,...jk,...kij->...ij", a, b, between)
