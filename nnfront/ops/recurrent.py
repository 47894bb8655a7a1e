# SPDX-License-Identifier: Apache-2.0
"""Recurrences over the tokens of a sequence: a short causal convolution, and the state space models of Mamba.

They are pure functions: a state comes in (None: zeros), and the state after the last token comes back. A few tokens take the recurrence
as it is written, many are taken in chunks, each of them a few products. Arithmetic is in float32, or in float64 for an x in that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from nnfront import dtypes
from nnfront.dims import Size, divides, equal, product
from nnfront.ir.op import op
from nnfront.ir.types import TensorType, TupleType
from nnfront.ops.rules import require, require_float, require_same, wide

# Tokens that are computed together. The products of a chunk grow with its length, the steps from chunk to chunk shrink with it: for heads
# of 64 to 128 features both are small here (Mamba-2, arXiv 2405.21060, section 6; the same for gated delta nets).
CHUNK = 64
FEW = 8
"""So many tokens are taken one after the other, each as it would be alone: what is computed of tokens that were guessed has the bits of decoding them."""

STRICTER = "sizes agree where the reference would broadcast, and a state has the dtype that it is computed in"


def require_axes(name: str, tensor: TensorType, axes: int) -> None:
    """Raise InferError unless a tensor has so many axes."""
    require(tensor.ndim == axes, "{} must have {} axes, got {}", name, axes, tensor.ndim)


def require_shape(name: str, tensor: TensorType | None, shape: Sequence[Size]) -> None:
    """Raise InferError unless a tensor, if there is one, holds floats in this shape."""
    if tensor is None:
        return
    require_float(tensor, name)
    require_axes(name, tensor, len(shape))
    for axis, (size, expected) in enumerate(zip(tensor.shape, shape, strict=True)):
        require_same(size, expected, f"axis {axis} of {name} is {{}}, expected {{}}")


def require_groups(heads: Size, groups: Size) -> None:
    """Raise InferError unless each group has as many heads: groups of a number that is known, or of one head each."""
    fits = divides(groups, heads) if isinstance(groups, int) and groups else equal(groups, heads)
    require(fits is True, "{} heads do not divide into {} groups", heads, groups)


def state_type(x: TensorType, state: TensorType | None, shape: Sequence[Size]) -> TensorType:
    """Return the type of a recurrent state of this shape; raises InferError for one that comes in otherwise."""
    dtype = dtypes.promote(x.dtype, "float32")
    require_shape("state", state, shape)
    require(state is None or state.dtype == dtype, "state must be {}, got {}", dtype, state and state.dtype)
    return TensorType(tuple(shape), dtype)


def _conv_flops(
    operands: Sequence[TensorType], results: Sequence[TensorType], attrs: Mapping[str, Any]
) -> Size:
    """Two operations for each element of the result and each tap."""
    return product([2, *results[0].shape, operands[1].shape[1]])


@op(
    stricter="sizes agree where the reference would broadcast, and a kernel has a tap",
    flops=_conv_flops,
    dtype_policy="first",
)
def causal_conv1d(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    state: TensorType | None = None,
    *,
    activation: str | None = None,
) -> TupleType:
    """Convolve each channel with its own taps over this token and those before it: y[t] = sum over i of weight[i] * x[t - width + 1 + i].

    Shapes: x [batch, seq, channels]; weight [channels, width]; bias [channels]; state [batch, channels, width - 1], the tokens before
    the first, None for zeros. Returns y, in x's type, and the state for the token after the last, in the dtype of `state`, or x's.
    activation: None or "silu", of y.
    Source: Mamba (arXiv 2312.00752), section 3.4.
    """
    require(activation in (None, "silu"), "activation must be None or 'silu', got {!r}", activation)
    require_float(x)
    require_axes("x", x, 3)
    require_axes("weight", weight, 2)
    batch, _, channels = x.shape
    width = weight.shape[1]
    require(not (isinstance(width, int) and width == 0), "weight has no taps")
    require_shape("weight", weight, (channels, width))
    require_shape("bias", bias, (channels,))
    require_shape("state", state, (batch, channels, width - 1))
    kept = TensorType((batch, channels, width - 1), x.dtype if state is None else state.dtype)
    return TupleType((x, kept))


@causal_conv1d.reference
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, (channels, width) = wide(x.dtype), weight.shape
    if state is None:
        state = x.new_zeros(x.shape[0], channels, width - 1)
    tokens = torch.cat([state.to(dtype), x.mT.to(dtype)], 2)
    taps, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    if x.shape[1] <= FEW:
        y = tokens.new_empty(x.mT.shape)
        for t in range(x.shape[1]):
            y[..., t] = (tokens[..., t : t + width] * taps).sum(-1)
        y = y if offset is None else y + offset[:, None]
    elif not channels:
        y = tokens.new_empty(x.mT.shape)
    else:
        y = F.conv1d(tokens, taps[:, None], offset, groups=channels)
    y = y if activation is None else F.silu(y)
    last = tokens[:, :, x.shape[1] :]
    return y.mT.to(x.dtype).contiguous(), last.to(
        state.dtype, copy=True, memory_format=torch.contiguous_format
    )


def _scan_flops(
    operands: Sequence[TensorType], results: Sequence[TensorType], attrs: Mapping[str, Any]
) -> Size:
    """Two operations to write each element of the state and two to read it, for each token: those of the recurrence."""
    return product([4, operands[0].shape[1], *results[1].shape])


@op(stricter=STRICTER, flops=_scan_flops, dtype_policy="first")
def ssm_scan(
    x: TensorType,
    dt: TensorType,
    a: TensorType,
    b: TensorType,
    c: TensorType,
    d: TensorType | None = None,
    state: TensorType | None = None,
) -> TupleType:
    """The state space model of Mamba-2: state = exp(dt * a) * state + dt * x b^T, and y = state c + d * x, token by token.

    Shapes: x [batch, seq, heads, size]; dt [batch, seq, heads], the steps, as they are after bias, softplus and limits; a [heads],
    negative; b and c [batch, seq, groups, states], group i for heads i * heads / groups and those after it; d [heads];
    state [batch, heads, size, states] float32, None for zeros. Returns y, in x's type, and the state after the last token, float32.
    Source: Mamba-2 (arXiv 2405.21060), section 6: within a chunk of tokens a product like attention, between chunks the recurrence.
    """
    require_float(x)
    for name, tensor, axes in (("x", x, 4), ("b", b, 4)):
        require_axes(name, tensor, axes)
    batch, seq, heads, size = x.shape
    groups, states = b.shape[2:]
    require_groups(heads, groups)
    for name, own, shape in (
        ("dt", dt, (batch, seq, heads)),
        ("a", a, (heads,)),
        ("b", b, (batch, seq, groups, states)),
        ("c", c, (batch, seq, groups, states)),
        ("d", d, (heads,)),
    ):
        require_shape(name, own, shape)
    return TupleType((x, state_type(x, state, (batch, heads, size, states))))


@ssm_scan.reference
def _(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All of it as [batch, groups, heads of a group, tokens, ...]."""
    (batch, seq, heads, size), (groups, states) = x.shape, b.shape[2:]
    dtype, together = wide(x.dtype), (groups, heads // groups if groups else 0)
    state = x.new_zeros(batch, heads, size, states, dtype=dtype) if state is None else state
    h = torch.unflatten(state, 1, together)
    steps = torch.unflatten(dt.to(dtype).mT, 1, together)  # [..., tokens]
    # The log of what each token leaves of the state.
    fade = steps * torch.unflatten(a.to(dtype), 0, together)[..., None]
    given = torch.unflatten(x.to(dtype).transpose(1, 2), 1, together)
    into = given * steps[..., None]
    write, read = (m.to(dtype).transpose(1, 2)[:, :, None] for m in (b, c))
    y = torch.empty_like(into)
    if seq <= FEW:
        for t in range(seq):
            one = slice(t, t + 1)
            h = (h * fade[..., one, None].exp()).addcmul_(into[..., one, :].mT, write[..., one, :])
            y[..., one, :] = (h @ read[..., one, :].mT).mT
    else:
        for first in range(0, seq, CHUNK):
            tokens = slice(first, first + CHUNK)
            now, last, between = decays(fade[..., tokens])
            v, w, r = into[..., tokens, :], write[..., tokens, :], read[..., tokens, :]
            y[..., tokens, :] = ((r @ w.mT) * between) @ v + now[..., None] * (r @ h.mT)
            h = h * now[..., -1, None, None] + (v * last[..., None]).mT @ w
    if d is not None:
        y = y + torch.unflatten(d.to(dtype), 0, together)[..., None, None] * given
    y = y.flatten(1, 2).transpose(1, 2).to(x.dtype).contiguous()
    return y, h.flatten(1, 2) if seq else state.clone()


def decays(fade: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what is left, where each of the tokens [..., t] leaves exp(fade) of what was: of the state before them after each token,
    of each token's part after the last, and of the part of j after i, [..., t, t], 0 where i < j.

    A difference of two sums has few digits left of a small one: they are made in float64.
    """
    sums = fade.cumsum(-1, dtype=torch.float64)
    later = torch.ones(fade.shape[-1], fade.shape[-1], dtype=torch.bool, device=fade.device).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf)
    return sums.to(fade.dtype).exp(), between[..., -1, :].to(fade.dtype).exp(), between.to(fade.dtype).exp()


@op(stricter=STRICTER, flops=_scan_flops, dtype_policy="first")
def selective_scan(
    x: TensorType,
    dt: TensorType,
    a: TensorType,
    b: TensorType,
    c: TensorType,
    d: TensorType | None = None,
    state: TensorType | None = None,
) -> TupleType:
    """The state space model of Mamba: state = exp(dt * a) * state + dt * x b, and y = state c + d * x, token by token.

    Shapes: x [batch, seq, channels]; dt [batch, seq, channels], the steps, as they are after bias and softplus; a [channels, states],
    negative; b and c [batch, seq, states]; d [channels]; state [batch, channels, states] float32, None for zeros. Returns y, in x's
    type, and the state after the last token, float32.
    Source: Mamba (arXiv 2312.00752), algorithm 2.
    """
    require_float(x)
    require_axes("x", x, 3)
    require_axes("a", a, 2)
    batch, seq, channels = x.shape
    states = a.shape[1]
    for name, own, shape in (
        ("dt", dt, (batch, seq, channels)),
        ("a", a, (channels, states)),
        ("b", b, (batch, seq, states)),
        ("c", c, (batch, seq, states)),
        ("d", d, (channels,)),
    ):
        require_shape(name, own, shape)
    return TupleType((x, state_type(x, state, (batch, channels, states))))


@selective_scan.reference
def _(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = wide(x.dtype)
    given, steps, rates, write, read = (m.to(dtype) for m in (x, dt, a, b, c))
    h = x.new_zeros(x.shape[0], *a.shape, dtype=dtype) if state is None else state
    into, y = given * steps, torch.empty_like(given)
    # The states of all tokens at once would be as many numbers as the cache of attention.
    for first in range(0, x.shape[1], CHUNK):
        tokens = slice(first, first + CHUNK)
        left = (steps[:, tokens, :, None] * rates).exp()
        states = into[:, tokens, :, None] * write[:, tokens, None, :]
        for t in range(states.shape[1]):
            h = states[:, t].addcmul_(left[:, t], h)
        y[:, tokens] = (states * read[:, tokens, None, :]).sum(-1)
    y = y if d is None else y + d.to(dtype) * given
    return y.to(x.dtype), h.clone()
