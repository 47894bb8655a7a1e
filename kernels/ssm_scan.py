# SPDX-License-Identifier: Apache-2.0
"""The state space model of Mamba-2 over the tokens of each sequence.

    h[t] = exp(dt[t] a) h[t - 1] + dt[t] x[t] b[t]^T          y[t] = h[t] c[t] + d x[t]

Shapes: x and y [batch, seq, heads, size]; dt [batch, seq, heads]; a and d [heads], d may be absent; b and c [batch, seq, groups, states],
group i for heads i * heads / groups and those after it; the state h [batch, heads, size, states] float32, without one zeros. x, b and c
are of one dtype and adjacent along their last axis, dt, a and d any floats. Results are y and the state after the last token.

One token reads and writes the state once. More are taken in chunks by a block that holds its part of the state (`recurrence.py`).
Sums are in a fixed order: repeatable bit for bit.

Source: Dao and Gu, arXiv 2405.21060, section 6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.cache import moved
from nnfront_kernels.common import (
    ARCHS,
    Config,
    Kernel,
    KernelError,
    Plan,
    empties,
    launcher,
    strides,
    taking,
)
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.recurrence import (
    DTYPES,
    block_of,
    left_of_earlier,
    product,
    refusal,
    require_shape,
    require_state,
    theirs,
    widest,
)
from nnfront_kernels.tiles import cdiv

MOST = 256


@dataclass(frozen=True)
class ScanShape:
    """`seq` tokens of each of `batch` sequences; heads of `size` features, `states` numbers for each of them."""

    batch: int
    seq: int
    heads: int
    groups: int
    size: int
    states: int


def reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    *,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float32 or in `compute`, token by token."""
    batch, seq, heads, size = x.shape
    shared = heads // b.shape[2]
    wide, write, read = x.to(compute), *(m.to(compute).repeat_interleave(shared, 2) for m in (b, c))
    h = wide.new_zeros(batch, heads, size, b.shape[3]) if state is None else state.to(compute)
    y = torch.empty_like(wide)
    for t in range(seq):
        step = dt[:, t].to(compute)
        h = h * (step * a.to(compute)).exp()[..., None, None]
        h = h + (step[..., None] * wide[:, t])[..., None] * write[:, t, :, None]
        y[:, t] = (h * read[:, t, :, None]).sum(-1)
    if d is not None:
        y = y + d.to(compute)[:, None] * wide
    return y.to(x.dtype), h.to(torch.float32 if compute == torch.float32 else compute)


# Tokens of a chunk (1: the recurrence as it is written) x features of a block, which sm_80 has fewer of as more would spill. Not yet measured.
CONFIGS = {
    name: (Config(1, 16, 1, 4, 1), Config(32, 16 if arch.family == "sm_80" else 32, 1, 4, 1))
    for name, arch in ARCHS.items()
}


def choose(shape: ScanShape, dtype: str, arch: str) -> Config:
    """The recurrence for one token, else chunks."""
    return KERNEL.configs[arch][shape.seq > 1]


def shared_bytes(config: Config) -> int:
    """What products of a chunk take at most, for states of `MOST`."""
    rows, columns = config.block_m, config.block_n
    return 1024 + (4 * (2 * rows * MOST + columns * MOST + rows * (rows + columns)) if rows > 1 else 4 * 64)


@triton.jit(do_not_specialize=["SEQ"])
def ssm_scan_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    state_ptr,
    after_ptr,
    base_ptr,
    y_ptr,
    SEQ,
    stride_xb, stride_xt, stride_xh,
    stride_sb, stride_st, stride_sh,
    stride_bb, stride_bt, stride_bg,
    stride_cb, stride_ct, stride_cg,
    stride_yb, stride_yt, stride_yh,
    SHARED: tl.constexpr,  # heads of a group
    SIZE: tl.constexpr,
    STATES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    let_next_start(PDL)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p, s = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    inside_p, inside_s = p < SIZE, s < STATES
    # States x features, as products want them.
    held = inside_p[None, :] & (s < theirs(STATES, base_ptr))[:, None]
    at_state = ((batch * tl.num_programs(1) + head) * SIZE + p[None, :]) * STATES + s[:, None]
    state_ptr = moved(state_ptr, base_ptr, 0)
    after_ptr = moved(after_ptr, base_ptr, 0)
    if state_ptr is None:
        h = tl.zeros((BLOCK_S, BLOCK_P), dtype=tl.float32)
    else:
        h = tl.load(state_ptr + at_state, mask=held, other=0.0)
    rate = tl.load(a_ptr + head).to(tl.float32)
    skip = 0.0
    if d_ptr is not None:
        skip = tl.load(d_ptr + head).to(tl.float32)
    x_head = x_ptr + batch * stride_xb + head * stride_xh
    y_head = y_ptr + batch * stride_yb + head * stride_yh
    b_group = b_ptr + batch * stride_bb + head // SHARED * stride_bg
    c_group = c_ptr + batch * stride_cb + head // SHARED * stride_cg
    dt_head = dt_ptr + batch * stride_sb + head * stride_sh
    if CHUNK == 1:
        step = tl.load(dt_head).to(tl.float32)
        x = tl.load(x_head + p, mask=inside_p, other=0.0).to(tl.float32)
        write = tl.load(b_group + s, mask=inside_s, other=0.0).to(tl.float32)
        read = tl.load(c_group + s, mask=inside_s, other=0.0).to(tl.float32)
        h = h * tl.exp(step * rate) + (step * x)[None, :] * write[:, None]
        y = tl.sum(h * read[:, None], axis=0) + skip * x
        tl.store(y_head + p, y.to(y_ptr.dtype.element_ty), mask=inside_p)
    else:
        for first in range(0, SEQ, CHUNK):
            t = first + tl.arange(0, CHUNK)
            inside_t = t < SEQ
            token = t.to(tl.int64)[:, None]
            # A token beyond the last takes no step: it leaves the state as it is.
            steps = tl.load(dt_head + t.to(tl.int64) * stride_st, mask=inside_t, other=0.0).to(tl.float32)
            in_x, in_s = inside_t[:, None] & inside_p[None, :], inside_t[:, None] & inside_s[None, :]
            x = tl.load(x_head + token * stride_xt + p[None, :], mask=in_x, other=0.0)
            write = tl.load(b_group + token * stride_bt + s[None, :], mask=in_s, other=0.0)
            read = tl.load(c_group + token * stride_ct + s[None, :], mask=in_s, other=0.0)
            sums, last = tl.cumsum(steps * rate, axis=0), tl.sum(steps * rate, axis=0)
            # Steps are factors of rows: products are of tokens as they are.
            scores = (
                tl.dot(read, write.T, input_precision="tf32") * left_of_earlier(sums, CHUNK) * steps[None, :]
            )
            y = product(read, h, tl.zeros((CHUNK, BLOCK_P), dtype=tl.float32)) * tl.exp(sums)[:, None]
            y = product(scores, x, y) + skip * x.to(tl.float32)
            tl.store(y_head + token * stride_yt + p[None, :], y.to(y_ptr.dtype.element_ty), mask=in_x)
            kept = x.to(tl.float32) * (steps * tl.exp(last - sums))[:, None]
            h = product(write.T, kept, h * tl.exp(last))
    tl.debug_barrier()  # several threads may have read one element
    tl.store(after_ptr + at_state, h, mask=held)


@taking(DTYPES)
def accepts(shape: ScanShape, dtype: str, arch: str) -> str | None:
    if shape.groups < 1 or shape.heads % shape.groups:
        return f"heads must be a multiple of groups, got {shape.heads} and {shape.groups}"
    return refusal({"features of a head": shape.size, "states": shape.states}, MOST, shape.batch)


def plan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Return y and the state after the last token. Of no tokens the state is not written: there must be one at least.

    Option: out, to write y to; after, to write the state to, which may be the one before; base (`recurrence.py`).
    """
    if x.ndim != 4 or b.ndim != 4:
        raise KernelError(f"x and b must have 4 axes, got {list(x.shape)} and {list(b.shape)}")
    batch, seq, heads, size = x.shape
    groups, states = b.shape[2:]
    shape = ScanShape(batch, seq, heads, groups, size, states)
    arch, config = KERNEL.settle(shape, x, arch, config)
    require_shape("x", x, x.shape)
    for name, tensor in (("b", b), ("c", c)):
        require_shape(name, tensor, (batch, seq, groups, states))
        if tensor.dtype != x.dtype:
            raise KernelError(f"{name} must be {x.dtype} as x, got {tensor.dtype}")
    if dt.shape != (batch, seq, heads):
        raise KernelError(f"dt must be {[batch, seq, heads]}, got {list(dt.shape)}")
    for name, vector in (("a", a), *(() if d is None else (("d", d),))):
        require_shape(name, vector, (heads,))
    kept = require_state(state, after, base, (batch, heads, size, states), torch.float32, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    require_shape("out", out, x.shape)
    block_s = block_of(states, MOST)
    block_p = block_of(size, widest(config.block_n, block_s))
    return Plan(
        kernel=ssm_scan_kernel,
        grid=(cdiv(size, block_p), heads, batch),
        arguments={
            "x_ptr": x,
            "dt_ptr": dt,
            "a_ptr": a,
            "b_ptr": b,
            "c_ptr": c,
            "d_ptr": d,
            **kept,
            "y_ptr": out,
            "SEQ": seq,
            **strides("x", x, "bth"),
            **strides("s", dt, "bth"),
            **strides("b", b, "btg"),
            **strides("c", c, "btg"),
            **strides("y", out, "bth"),
        },
        constants={
            "SHARED": heads // groups,
            "SIZE": size,
            "STATES": states,
            "CHUNK": config.block_m,
            "BLOCK_P": block_p,
            "BLOCK_S": block_s,
            "PDL": overlaps(arch),
        },
        config=config,
        output=out,
        also=("after_ptr",),
    )


def example(shape: ScanShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make = empties(dtype, device)
    tokens = (shape.batch, shape.seq)
    x = make(*tokens, shape.heads, shape.size)
    both = [make(*tokens, shape.groups, shape.states) for _ in range(2)]
    rates = [make(shape.heads, kind="float32") for _ in range(2)]
    state = make(shape.batch, shape.heads, shape.size, shape.states, kind="float32")
    return (x, make(*tokens, shape.heads, kind="float32"), rates[0], *both, rates[1], state), {}


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shape_for=lambda shape, config: replace(shape, seq=1) if config.block_m == 1 else shape,
    typical=ScanShape(4, 2048, 80, 1, 64, 128),
)
