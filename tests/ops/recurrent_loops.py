# SPDX-License-Identifier: Apache-2.0
"""Recurrences as their formulas say them, one token after the other, each step a product of matrices: `LOOPS[op](*operands, **attributes)`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nnfront import ops
from nnfront.ir import Op


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    batch, seq, channels = x.shape
    before = x.new_zeros(batch, channels, weight.shape[1] - 1) if state is None else state
    ys = []
    for t in range(seq):
        window = torch.cat([before, x[:, t, :, None]], 2)
        y = (window[..., None, :] @ weight[..., None])[..., 0, 0]
        ys.append(y if bias is None else y + bias)
        before = window[..., 1:]
    y = torch.stack(ys, 1)
    return y if activation is None else F.silu(y), before


def ssm_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    (batch, seq, heads, size), (groups, states) = x.shape, b.shape[2:]
    h = x.new_zeros(batch, heads, size, states) if state is None else state
    b, c = (m.repeat_interleave(heads // groups, 2)[..., None] for m in (b, c))
    ys = []
    for t in range(seq):
        step = dt[:, t, :, None, None]
        h = (step * a[:, None, None]).exp() * h + (step * x[:, t, ..., None]) @ b[:, t].mT
        ys.append((h @ c[:, t])[..., 0] + (0 if d is None else d[:, None] * x[:, t]))
    return torch.stack(ys, 1), h


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h = x.new_zeros(x.shape[0], *a.shape) if state is None else state
    ys = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None]
        h = (step * a).exp() * h + (step * x[:, t, :, None]) @ b[:, t, None, :]
        ys.append((h @ c[:, t, :, None])[..., 0] + (0 if d is None else d * x[:, t]))
    return torch.stack(ys, 1), h


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    (batch, seq, heads, value_size), (groups, key_size) = v.shape, k.shape[2:]
    h = v.new_zeros(batch, heads, key_size, value_size) if state is None else state
    if qk_l2norm:
        q, k = (m / (m.square().sum(-1, keepdim=True) + 1e-6).sqrt() for m in (q, k))
    q, k = (m.repeat_interleave(heads // groups, 2)[..., None] for m in (q, k))
    g = g[..., None] if g.ndim == 4 else g[..., None, None]
    ys = []
    for t in range(seq):
        h = g[:, t].exp() * h
        h = h + k[:, t] @ (beta[:, t, :, None, None] * (v[:, t, :, None] - k[:, t].mT @ h))
        ys.append((q[:, t].mT @ h)[..., 0, :] * (key_size**-0.5 if scale is None else scale))
    return torch.stack(ys, 1), h


LOOPS: dict[Op, Callable[..., Any]] = {
    ops.causal_conv1d: causal_conv1d,
    ops.ssm_scan: ssm_scan,
    ops.selective_scan: selective_scan,
    ops.gated_delta_rule: gated_delta_rule,
}
