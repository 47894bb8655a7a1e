# SPDX-License-Identifier: Apache-2.0
"""Convolve each channel with its own taps over a token and those before it.

    y[t, c] = act(bias[c] + sum_i weight[c, i] x[t - width + 1 + i, c])

Shapes: x and y [batch, seq, channels], adjacent along channels; weight [channels, width], bias [channels]; the state [batch, channels, width
- 1], dense, holds the tokens before the first, without one zeros. Any floats; y is of x's dtype, computed in float32 and rounded once.
Results are y and the state for the token after the last, of the dtype of the state, or of x. act is silu or nothing.

Source: Mamba, arXiv 2312.00752, section 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.cache import moved
from nnfront_kernels.common import (
    Config,
    Kernel,
    KernelError,
    Plan,
    empties,
    launcher,
    require_vector,
    strides,
    taking,
)
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.recurrence import DTYPES, require_shape, require_state, theirs
from nnfront_kernels.tiles import cdiv

MOST = 16


@dataclass(frozen=True)
class ConvShape:
    """`seq` tokens of each of `batch` sequences, `width` taps of each channel."""

    batch: int
    seq: int
    channels: int
    width: int = 4


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    *,
    silu: bool = False,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float32 or in `compute`, tap by tap."""
    batch, seq, channels = x.shape
    width = weight.shape[1]
    before = x.new_zeros(batch, channels, width - 1) if state is None else state
    tokens = torch.cat([before.to(compute), x.to(compute).mT], 2)
    y = sum(tokens[:, :, i : i + seq] * weight.to(compute)[:, i, None] for i in range(width))
    y = y if bias is None else y + bias.to(compute)[:, None]
    y = y * torch.sigmoid(y) if silu else y
    return y.mT.to(x.dtype), tokens[:, :, seq:].to(before.dtype)


# Tokens x channels of a block: of one token as many channels as keep the reads wide. By arithmetic, not yet measured.
CONFIGS = (Config(1, 512, 1, 2, 1), Config(16, 128, 1, 4, 1))


def choose(shape: ConvShape, dtype: str, arch: str) -> Config:
    """The wide block for one token, else the tall one."""
    return CONFIGS[shape.seq > 1]


@triton.jit
def token_at(x_channels, state_channels, source, inside, held, stride_xt, WIDTH: tl.constexpr):
    """Channels of the tokens `source`, float32: of x from 0 on, before that of the state where it is `held`, else 0."""
    token = tl.load(x_channels + source * stride_xt, mask=inside & (source >= 0), other=0.0).to(tl.float32)
    if state_channels is not None:
        kept = tl.load(state_channels + (source + WIDTH - 1), mask=held & (source < 0), other=0.0)
        token += kept.to(tl.float32)
    return token


@triton.jit(do_not_specialize=["SEQ"])
def causal_conv1d_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    state_ptr,
    after_ptr,
    base_ptr,
    y_ptr,
    SEQ,
    CHANNELS,
    stride_xb, stride_xt,
    stride_wc,
    stride_yb, stride_yt,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    let_next_start(PDL)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    inside_c = c < CHANNELS
    inside = inside_c & (t < SEQ)
    held = c < theirs(CHANNELS, base_ptr)
    x_channels = x_ptr + batch * stride_xb + c
    state_ptr = moved(state_ptr, base_ptr, 0)
    after_ptr = moved(after_ptr, base_ptr, 0)
    at_state = (batch * CHANNELS + c) * (WIDTH - 1)
    state_channels = None
    if state_ptr is not None:
        state_channels = state_ptr + at_state
    y = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for i in tl.static_range(WIDTH):
        weight = tl.load(w_ptr + c * stride_wc + i, mask=inside_c, other=0.0).to(tl.float32)
        y += weight * token_at(
            x_channels, state_channels, t + (i - WIDTH + 1), inside, held, stride_xt, WIDTH
        )
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c, mask=inside_c, other=0.0).to(tl.float32)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(y_ptr + batch * stride_yb + t * stride_yt + c, y.to(y_ptr.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        for i in tl.static_range(WIDTH - 1):
            source = tl.zeros((1, BLOCK_C), dtype=tl.int64) + (SEQ + i - WIDTH + 1)
            last = token_at(x_channels, state_channels, source, inside_c, held, stride_xt, WIDTH)
            tl.debug_barrier()  # later elements are read before earlier ones are written
            tl.store(after_ptr + at_state + i, last.to(after_ptr.dtype.element_ty), mask=held)


@taking(DTYPES)
def accepts(shape: ConvShape, dtype: str, arch: str) -> str | None:
    if not 1 <= shape.width <= MOST:
        return f"there must be 1 to {MOST} taps, got {shape.width}"
    return None if shape.batch < 2**16 else f"there must be less than 65536 sequences, got {shape.batch}"


def plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    *,
    silu: bool = False,
    out: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Return y and the state for the token after the last. Of no tokens the state is not written: there must be one at least.

    Options: silu; out, to write y to; after, to write the state to, which may be the one before; base (`recurrence.py`).
    """
    if x.ndim != 3 or weight.ndim != 2:
        raise KernelError(
            f"x must be [batch, seq, channels] and weight [channels, width], got {list(x.shape)} and {list(weight.shape)}"
        )
    (batch, seq, channels), width = x.shape, weight.shape[1]
    shape = ConvShape(batch, seq, channels, width)
    arch, config = KERNEL.settle(shape, x, arch, config)
    require_shape("x", x, x.shape)
    require_shape("weight", weight, (channels, width))
    if bias is not None:
        require_vector("bias", bias, channels)
    kept = require_state(state, after, base, (batch, channels, width - 1), None, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    require_shape("out", out, x.shape)
    return Plan(
        kernel=causal_conv1d_kernel,
        grid=(cdiv(channels, config.block_n), cdiv(seq, config.block_m), batch),
        arguments={
            "x_ptr": x,
            "w_ptr": weight,
            "bias_ptr": bias,
            **kept,
            "y_ptr": out,
            "SEQ": seq,
            "CHANNELS": channels,
            **strides("x", x, "bt"),
            **strides("w", weight, "c"),
            **strides("y", out, "bt"),
        },
        constants={
            "WIDTH": width,
            "SILU": silu,
            "BLOCK_T": config.block_m,
            "BLOCK_C": config.block_n,
            "PDL": overlaps(arch),
        },
        config=config,
        output=out,
        also=("after_ptr",),
    )


def example(shape: ConvShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make = empties(dtype, device)
    x, weight = make(shape.batch, shape.seq, shape.channels), make(shape.channels, shape.width)
    return (x, weight, make(shape.channels), make(shape.batch, shape.channels, shape.width - 1)), {
        "silu": True
    }


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shared_bytes=lambda config: 8 * config.block_m * config.block_n,
    shape_for=lambda shape, config: replace(shape, seq=1) if config.block_m == 1 else shape,
    typical=ConvShape(4, 2048, 8192),
)
