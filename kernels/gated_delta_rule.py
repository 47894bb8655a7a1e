# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over the tokens of each sequence.

    h <- exp(g[t]) h        u = beta[t] (v[t] - h^T k[t])        h <- h + k[t] u^T        y[t] = scale h^T q[t]

Shapes: q and k [batch, seq, groups, key size], group i for heads i * heads / groups and those after it; v and y [batch, seq, heads, value
size]; g and beta [batch, seq, heads], any floats, or g [batch, seq, heads, key size], a rate for each channel of the key, for one token
only; the state h [batch, heads, key size, value size] float32, without one zeros. With `normed` each q and k is divided by the root of
its sum of squares + 1e-6. q, k and v are of one dtype and adjacent along their last axis. Results are y and the state after the last token.

One token reads and writes the state once. More are taken in chunks by a block that holds its columns of the state (`recurrence.py`): what the
tokens of a chunk find of one another is a triangular system, which is solved token by token for all columns, so that nothing grows in between.
Sums are in a fixed order: repeatable bit for bit.

Source: Yang et al., arXiv 2412.06464, section 3; rates by channel: Kimi Linear, arXiv 2510.26692, section 3.
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
class DeltaShape:
    """`seq` tokens of each of `batch` sequences; `channels`: each channel of a key has a rate of its own."""

    batch: int
    seq: int
    groups: int
    heads: int
    key_size: int
    value_size: int
    channels: bool = False


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    normed: bool = False,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float32 or in `compute`, token by token."""
    (batch, seq, groups, key_size), (heads, value_size) = q.shape, v.shape[2:]
    query, key = (x.to(compute).repeat_interleave(heads // groups, 2) for x in (q, k))
    if normed:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    query = query * (key_size**-0.5 if scale is None else scale)
    h = query.new_zeros(batch, heads, key_size, value_size) if state is None else state.to(compute)
    y = query.new_empty(batch, seq, heads, value_size)
    for t in range(seq):
        fade = g[:, t].to(compute).exp()
        h = h * (fade if g.ndim == 4 else fade[..., None])[..., None]
        found = (h * key[:, t, :, :, None]).sum(2)
        change = beta[:, t].to(compute)[..., None] * (v[:, t].to(compute) - found)
        h = h + key[:, t, :, :, None] * change[:, :, None]
        y[:, t] = (h * query[:, t, :, :, None]).sum(2)
    return y.to(q.dtype), h


# Tokens of a chunk (1: the recurrence as it is written) x columns of a state, which sm_80 has fewer of as more would spill. Not yet measured.
CONFIGS = {
    name: (Config(1, 16, 1, 4, 1), Config(16, 16 if arch.family == "sm_80" else 32, 1, 4, 1))
    for name, arch in ARCHS.items()
}


def choose(shape: DeltaShape, dtype: str, arch: str) -> Config:
    """The recurrence for one token, else chunks."""
    return KERNEL.configs[arch][shape.seq > 1]


def shared_bytes(config: Config) -> int:
    """What products of a chunk, or sums over keys, take at most, for keys of `MOST`."""
    rows, columns = config.block_m, config.block_n
    return 2048 + 4 * (2 * rows + columns) * MOST


@triton.jit
def inverse_norm(x, NORMED: tl.constexpr):
    """What rows [n, size] are multiplied with: [n], 1 unless they are normed."""
    squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
    return 1.0 / tl.sqrt_rn(squares + 1e-6) if NORMED else tl.zeros_like(squares) + 1.0


@triton.jit(do_not_specialize=["SEQ"])
def gated_delta_rule_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    after_ptr,
    base_ptr,
    y_ptr,
    SEQ,
    stride_qb, stride_qt, stride_qg,
    stride_kb, stride_kt, stride_kg,
    stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh,
    stride_bb, stride_bt, stride_bh,
    stride_yb, stride_yt, stride_yh,
    scale,
    SHARED: tl.constexpr,  # heads of a group
    NORMED: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    let_next_start(PDL)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    dk, dv = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_k, inside_v = dk < SIZE_K, dv < SIZE_V
    held = inside_k[:, None] & (dv < theirs(SIZE_V, base_ptr))[None, :]
    at_state = ((batch * tl.num_programs(1) + head) * SIZE_K + dk[:, None]) * SIZE_V + dv[None, :]
    state_ptr = moved(state_ptr, base_ptr, 0)
    after_ptr = moved(after_ptr, base_ptr, 0)
    if state_ptr is None:
        h = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    else:
        h = tl.load(state_ptr + at_state, mask=held, other=0.0)
    q_group = q_ptr + batch * stride_qb + head // SHARED * stride_qg
    k_group = k_ptr + batch * stride_kb + head // SHARED * stride_kg
    v_head = v_ptr + batch * stride_vb + head * stride_vh
    y_head = y_ptr + batch * stride_yb + head * stride_yh
    g_head = g_ptr + batch * stride_gb + head * stride_gh
    beta_head = beta_ptr + batch * stride_bb + head * stride_bh
    if CHUNK == 1:
        # The same key and query for all columns, as a column.
        key = tl.load(k_group + dk[None, :], mask=inside_k[None, :], other=0.0)
        query = tl.load(q_group + dk[None, :], mask=inside_k[None, :], other=0.0)
        query = tl.trans(query.to(tl.float32) * (inverse_norm(query, NORMED) * scale)[:, None])
        key = tl.trans(key.to(tl.float32) * inverse_norm(key, NORMED)[:, None])
        if CHANNELS:
            h = h * tl.exp(tl.load(g_head + dk, mask=inside_k, other=0.0).to(tl.float32))[:, None]
        else:
            h = h * tl.exp(tl.load(g_head).to(tl.float32))
        value = tl.load(v_head + dv, mask=inside_v, other=0.0).to(tl.float32)
        change = tl.load(beta_head).to(tl.float32) * (value - tl.sum(h * key, axis=0))
        h += key * change[None, :]
        tl.store(y_head + dv, tl.sum(h * query, axis=0).to(y_ptr.dtype.element_ty), mask=inside_v)
    else:
        at = tl.arange(0, CHUNK)
        for first in range(0, SEQ, CHUNK):
            t = (first + at).to(tl.int64)
            inside_t = t < SEQ
            # A token beyond the last changes nothing: its rate is 0, and so are its beta and its key.
            fade = tl.load(g_head + t * stride_gt, mask=inside_t, other=0.0).to(tl.float32)
            beta = tl.load(beta_head + t * stride_bt, mask=inside_t, other=0.0).to(tl.float32)
            in_k, in_v = inside_t[:, None] & inside_k[None, :], inside_t[:, None] & inside_v[None, :]
            key = tl.load(k_group + t[:, None] * stride_kt + dk[None, :], mask=in_k, other=0.0)
            value = tl.load(v_head + t[:, None] * stride_vt + dv[None, :], mask=in_v, other=0.0).to(
                tl.float32
            )
            # Norms and rates are factors of rows: products are of keys and queries as they are, which 11 bits hold.
            of_key = inverse_norm(key, NORMED)
            sums, last = tl.cumsum(fade, axis=0), tl.sum(fade, axis=0)
            now, between = tl.exp(sums), left_of_earlier(sums, CHUNK) * of_key[None, :]
            # What a token finds at its key: what was there before the chunk, and what the chunk's earlier tokens put there.
            found = tl.dot(key, key.T, input_precision="tf32") * between * (beta * of_key)[:, None]
            earlier = product(key, h, tl.zeros((CHUNK, BLOCK_V), dtype=tl.float32)) * (now * of_key)[:, None]
            change = beta[:, None] * (value - earlier)
            for j in range(0, CHUNK - 1):
                done = tl.sum(tl.where(at[:, None] == j, change, 0.0), axis=0)
                weight = tl.sum(tl.where((at[None, :] == j) & (at[:, None] > j), found, 0.0), axis=1)
                change -= weight[:, None] * done[None, :]
            # Read here, and keys again below, as they would take the registers of what is computed in between.
            query = tl.load(q_group + t[:, None] * stride_qt + dk[None, :], mask=in_k, other=0.0)
            of_query = inverse_norm(query, NORMED) * scale
            scores = tl.dot(query, key.T, input_precision="tf32") * between
            y = product(query, h, tl.zeros((CHUNK, BLOCK_V), dtype=tl.float32)) * now[:, None]
            y = tl.dot(scores, change, y, input_precision="tf32") * of_query[:, None]
            tl.store(y_head + t[:, None] * stride_yt + dv[None, :], y.to(y_ptr.dtype.element_ty), mask=in_v)
            key = tl.load(k_group + t[:, None] * stride_kt + dk[None, :], mask=in_k, other=0.0)
            kept = change * (tl.exp(last - sums) * of_key)[:, None]
            h = product(key.T, kept, h * tl.exp(last))
    tl.debug_barrier()  # several threads may have read one element
    tl.store(after_ptr + at_state, h, mask=held)


@taking(DTYPES)
def accepts(shape: DeltaShape, dtype: str, arch: str) -> str | None:
    if shape.groups < 1 or shape.heads % shape.groups:
        return f"heads must be a multiple of groups, got {shape.heads} and {shape.groups}"
    if shape.channels and shape.seq > 1:
        return f"with a rate for each channel there must be one token, got {shape.seq}"
    sizes = {"elements of a key": shape.key_size, "elements of a value": shape.value_size}
    return refusal(sizes, MOST, shape.batch)


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    normed: bool = False,
    out: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Return y and the state after the last token. Of no tokens the state is not written: there must be one at least.

    Options: scale, 1 / sqrt(key size) without; normed; out, to write y to; after, to write the state to, which may be the one before; base (`recurrence.py`).
    """
    if q.ndim != 4 or v.ndim != 4:
        raise KernelError(f"q and v must have 4 axes, got {list(q.shape)} and {list(v.shape)}")
    (batch, seq, groups, key_size), (heads, value_size) = q.shape, v.shape[2:]
    shape = DeltaShape(batch, seq, groups, heads, key_size, value_size, g.ndim == 4)
    arch, config = KERNEL.settle(shape, q, arch, config)
    for name, tensor, sizes in (
        ("q", q, q.shape),
        ("k", k, q.shape),
        ("v", v, (batch, seq, heads, value_size)),
    ):
        require_shape(name, tensor, sizes)
        if tensor.dtype != q.dtype:
            raise KernelError(f"{name} must be {q.dtype} as q, got {tensor.dtype}")
    if beta.shape != (batch, seq, heads) or g.shape[:3] != beta.shape:
        raise KernelError(
            f"g and beta must be {[batch, seq, heads]}, got {list(g.shape)} and {list(beta.shape)}"
        )
    if shape.channels:
        require_shape("g", g, (batch, seq, heads, key_size))
    kept = require_state(state, after, base, (batch, heads, key_size, value_size), torch.float32, q)
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device) if out is None else out
    require_shape("out", out, v.shape)
    block_k = block_of(key_size, MOST)
    block_v = block_of(value_size, widest(config.block_n, block_k))
    return Plan(
        kernel=gated_delta_rule_kernel,
        grid=(cdiv(value_size, block_v), heads, batch),
        arguments={
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "g_ptr": g,
            "beta_ptr": beta,
            **kept,
            "y_ptr": out,
            "SEQ": seq,
            **strides("q", q, "btg"),
            **strides("k", k, "btg"),
            **strides("v", v, "bth"),
            **strides("g", g, "bth"),
            **strides("b", beta, "bth"),
            **strides("y", out, "bth"),
            "scale": float(key_size**-0.5 if scale is None else scale),
        },
        constants={
            "SHARED": heads // groups,
            "NORMED": normed,
            "CHANNELS": shape.channels,
            "SIZE_K": key_size,
            "SIZE_V": value_size,
            "CHUNK": config.block_m,
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "PDL": overlaps(arch),
        },
        config=config,
        output=out,
        also=("after_ptr",),
    )


def example(shape: DeltaShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make = empties(dtype, device)
    tokens = (shape.batch, shape.seq)
    q, k = (make(*tokens, shape.groups, shape.key_size) for _ in range(2))
    rates = (*tokens, shape.heads)
    g = make(*rates, *([shape.key_size] if shape.channels else []), kind="float32")
    state = make(shape.batch, shape.heads, shape.key_size, shape.value_size, kind="float32")
    return (q, k, make(*rates, shape.value_size), g, make(*rates, kind="float32"), state), {"normed": True}


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shape_for=lambda shape, config: replace(shape, seq=1) if config.block_m == 1 else shape,
    typical=DeltaShape(4, 2048, 16, 32, 128, 128),
)
