# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels share: one step over a block of keys, the end of a row, and the definition.

    z[i, j] = cap(scale * q[i] . k[j]) + bias[i, j]      cap(z) = soft_cap * tanh(z / soft_cap), or z
    y[i]    = sum_j exp(z[i, j]) v[j] / (sum_j exp(z[i, j]) + exp(sink))          over the keys j that query i sees

A query at position p sees the keys 0 .. p, with a window those above p - window, and of these with a bias of bools where it is true. A row keeps the largest z so far, the sum
of the exponentials relative to it and the weighted values, all float32; weights are rounded to the dtype of the values
before they meet them. Exponentials are powers of two of z * log2(e).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.cache import step_rows
from nnfront_kernels.common import Config, KernelError, require_vector, strides

LOG2E = 1.4426950408889634
DTYPES = ("float16", "bfloat16")
SIZES = (64, 80, 96, 128, 192, 256)


def padded(size: int) -> int:
    """The power of two that a block holds a head in."""
    return max(triton.next_power_of_2(size), 16)


@dataclass(frozen=True)
class Scores:
    """The arguments of `launch` that follow tensors of tokens: scale, 1 / sqrt(size) without; window; soft_cap; sinks [heads]; bias [batch, heads, seq, positions]."""

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def check(self, heads: int, kv_heads: int) -> None:
        """Raise KernelError unless these make sense for so many heads."""
        if kv_heads < 1 or heads < 1 or heads % kv_heads:
            raise KernelError(f"query heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        if self.window is not None and self.window < 1:
            raise KernelError(f"window must be at least 1, got {self.window}")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise KernelError(f"soft_cap must be above 0, got {self.soft_cap}")
        if self.sinks is not None:
            require_vector("sinks", self.sinks, heads)

    def factor(self, size: int) -> float:
        """What products of queries and keys of this size are multiplied with."""
        return size**-0.5 if self.scale is None else self.scale

    def arguments(self, q: torch.Tensor, shape: tuple[int, int, int], positions: int) -> dict[str, Any]:
        """The run-time arguments of a kernel. Raise KernelError unless a bias is [*shape, positions], [batch, heads, seq] with one for each position."""
        bias = self.bias
        if bias is not None:
            if bias.shape[:3] != shape or bias.shape[3] < positions or bias.stride(3) != 1:
                raise KernelError(
                    f"bias must be {[*shape, positions]} or longer, with adjacent positions, got {list(bias.shape)} with strides {list(bias.stride())}"
                )
            if bias.dtype not in (q.dtype, torch.float32, torch.bool):
                raise KernelError(f"bias must be {q.dtype}, float32 or bool, got {bias.dtype}")
        return {
            "sinks_ptr": self.sinks,
            "bias_ptr": bias,
            **strides("b", bias, "bht"),
            "scale": self.factor(q.shape[-1]) * LOG2E,
            "soft_cap": (self.soft_cap or 1.0) * LOG2E,
        }

    def constants(self) -> dict[str, Any]:
        """The constexpr arguments of a kernel."""
        return {"WINDOW": self.window or 0, "CAPPED": self.soft_cap is not None}

    def row(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        position: int,
        place: tuple[int, int],
        *,
        causal: bool = True,
    ) -> torch.Tensor:
        """The definition for one query: q [heads, size], keys and values [kv_heads, length, ...], in the dtype of q; `place`, its sequence and query of the bias."""
        heads, length = q.shape[0], keys.shape[1]
        last = position + 1 if causal else length
        first = 0 if self.window is None else max(position + 1 - self.window, 0)
        shared = heads // keys.shape[0]
        k, v = (t[:, first:last].to(q.dtype).repeat_interleave(shared, 0) for t in (keys, values))
        z = torch.einsum("hd,hnd->hn", q, k) * self.factor(q.shape[1])
        if self.soft_cap is not None:
            z = self.soft_cap * torch.tanh(z / self.soft_cap)
        if self.bias is not None:
            own = self.bias[place[0], :, place[1], first:last]
            z = z.masked_fill(~own, -torch.inf) if own.dtype == torch.bool else z + own.to(z.dtype)
        if self.sinks is not None:
            z = torch.cat([z, self.sinks.to(q.dtype)[:, None]], 1)
        weights = torch.softmax(z, 1)[:, : k.shape[1]] if z.shape[1] else z
        # For a query that sees nothing.
        weights = weights.masked_fill((z == -torch.inf).all(1, keepdim=True), 0.0)
        return torch.einsum("hn,hnd->hd", weights, v)


def refusal(batch: int, sizes: tuple[int, int]) -> str | None:
    """None, or why no attention kernel takes these sizes of heads."""
    for size in sizes:
        if size not in SIZES:
            return f"the size of a head must be one of {', '.join(map(str, SIZES))}, got {size}"
    return None if batch < 2**16 else f"there must be less than 65536 sequences, got {batch}"


def require_queries(q: torch.Tensor, first: str) -> None:
    """Raise KernelError unless this is [batch or tokens, heads, size], adjacent along size."""
    if q.ndim != 3 or q.stride(2) != 1:
        raise KernelError(
            f"q must be [{first}, heads, size] with adjacent elements, got {list(q.shape)} with strides {list(q.stride())}"
        )


def require_tokens(keys: torch.Tensor, values: torch.Tensor, tokens: int, dtype: torch.dtype) -> None:
    """Raise KernelError unless these are keys and values of the tokens themselves, [tokens, kv_heads, size] each."""
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.ndim != 3 or tensor.shape[:2] != (tokens, keys.shape[1]) or tensor.stride(2) != 1:
            raise KernelError(
                f"{name} must be [{tokens}, kv_heads, size] with adjacent elements, or a cache, "
                f"got {list(tensor.shape)} with strides {list(tensor.stride())}"
            )
        if tensor.dtype != dtype:
            raise KernelError(f"{name} must be {dtype}, got {tensor.dtype}")


def result(out: torch.Tensor | None, shape: tuple[int, ...], q: torch.Tensor) -> torch.Tensor:
    """Where y is written: `out`, or a new tensor. Raise KernelError unless it is of that shape, adjacent along its last axis."""
    if out is None:
        return torch.empty(shape, dtype=q.dtype, device=q.device)
    if out.shape != shape or out.dtype != q.dtype or out.stride(-1) != 1:
        raise KernelError(
            f"out must be {q.dtype} {list(shape)} with adjacent elements, got {out.dtype} {list(out.shape)} "
            f"with strides {list(out.stride())}"
        )
    return out


def shared_bytes(config: Config) -> int:
    """Shared memory of the pipelined keys and values and of the queries, for heads of block_k, and of barriers. Where single warps multiply there is a stage less."""
    kept = config.num_stages - (config.block_m < 64)
    return 2048 + 2 * config.block_k * (2 * kept * config.block_n + config.block_m)


@triton.jit
def attend_step(
    q,  # [BLOCK_M, BLOCK_DK]
    acc,  # [BLOCK_M, BLOCK_DV] float32
    largest,  # [BLOCK_M] float32
    total,  # [BLOCK_M] float32
    first,  # of the keys of this step
    start,  # keys from here
    end,  # to before here are in memory
    low,  # [BLOCK_M]: the first key that a row sees
    high,  # [BLOCK_M]: and the last
    page,  # of the keys of this step: `cache.page_of_step`
    keys_ptr,  # of the first slot of the first page, for this head
    values_ptr,
    stride_kp, stride_ks,
    stride_vp, stride_vs,
    scale,  # times log2(e)
    soft_cap,  # times log2(e)
    CAPPED: tl.constexpr,
    SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,  # some row does not see some key
    bias_rows=None,  # [BLOCK_M]
    inside=None,  # [BLOCK_M]: rows that have a bias
):  # fmt: skip
    at = first + tl.arange(0, BLOCK_N)
    held = (at >= start) & (at < end)
    dk, dv = tl.arange(0, BLOCK_DK)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    k_ptrs = step_rows(keys_ptr, page, first, stride_kp, stride_ks, PAGE, BLOCK_N)[:, None] + dk
    v_ptrs = step_rows(values_ptr, page, first, stride_vp, stride_vs, PAGE, BLOCK_N)[:, None] + dv
    if MASKED:
        k = tl.load(k_ptrs, mask=held[:, None] & (dk < SIZE_K), other=0.0)
        v = tl.load(v_ptrs, mask=held[:, None] & (dv < SIZE_V), other=0.0)
    else:
        k = tl.load(k_ptrs) if SIZE_K == BLOCK_DK else tl.load(k_ptrs, mask=dk < SIZE_K, other=0.0)
        v = tl.load(v_ptrs) if SIZE_V == BLOCK_DV else tl.load(v_ptrs, mask=dv < SIZE_V, other=0.0)
    z = tl.dot(q, k.T, input_precision="ieee") * scale
    z = limited(z, at, low, high, soft_cap, CAPPED, MASKED, bias_rows, inside, held[:, None])
    return add_values(acc, largest, total, z, v)


@triton.jit
def add_values(acc, largest, total, z, v):
    """Values weighted by scores z [BLOCK_M, BLOCK_N] added to those of earlier keys."""
    new = tl.maximum(largest, tl.max(z, axis=1))
    finite = tl.where(new == float("-inf"), 0.0, new)  # no key seen so far
    weights = tl.exp2(z - finite[:, None])
    shrink = tl.exp2(largest - finite)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new, total


@triton.jit
def bias_rows_of(bias_ptr, sequence, head, t, stride_bb, stride_bh, stride_bt):
    """Where the bias of each row begins, None without one."""
    rows = None
    if bias_ptr is not None:
        rows = bias_ptr + (
            sequence.to(tl.int64) * stride_bb + head.to(tl.int64) * stride_bh + t.to(tl.int64) * stride_bt
        )
    return rows


@triton.jit
def limited(
    z,
    at,
    low,
    high,
    soft_cap,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    bias_rows=None,  # [BLOCK_M]
    inside=None,  # [BLOCK_M]: rows that have a bias
    held=None,  # [BLOCK_N, 1]: keys that have one
):
    """Scores after the cap and the bias, -inf for keys that a row does not see."""
    if CAPPED:
        z = soft_cap * (1.0 - 2.0 / (tl.exp2(z / soft_cap * 2.8853900817779268) + 1.0))  # tanh; 2 log2(e)
    if bias_rows is not None:
        bias = tl.load(bias_rows[:, None] + at[None, :], mask=inside[:, None] & held.T, other=0)
        if bias.dtype == tl.int1:
            z = tl.where(bias, z, float("-inf"))
        else:
            z += bias.to(tl.float32) * 1.4426950408889634  # log2(e)
    if MASKED:
        seen = (at[None, :] >= low[:, None]) & (at[None, :] <= high[:, None])
        z = tl.where(seen, z, float("-inf"))
    return z


@triton.jit
def finish(acc, largest, total, sinks_ptr, head, inside):
    """The rows of y in float32: 0 for a row that sees nothing."""
    if sinks_ptr is not None:
        # 1.4427 is log2(e).
        sink = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.exp2(sink - new)
        acc = acc * shrink[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
