# SPDX-License-Identifier: Apache-2.0
"""What one token of each sequence costs besides products, in C: rope (of few tokens too), storing it in the cache, attention.

Between products that leave nothing in the caches each call of torch costs several times what it does. Attention alone: 14 heads of 64 in 2 groups at
540 tokens take 66 us in torch's flash attention and 27 here, 32 heads in 8 groups 160 and 60 (2 threads, EPYC with AVX512_BF16).
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from nnfront.backends.cpu.extension import NATIVE
from nnfront.state.layer import CacheLayer

# A tensor, or bytes behind its begin.
Operand: TypeAlias = torch.Tensor | tuple[torch.Tensor, int]

# Features of a head: a multiple of what a vector holds, up to what stays in registers.
VECTOR, MOST = 32, 256
BYTES = 2  # of an element
# Elements up to which C, which keeps to one thread, was seen to be the faster way: heads of 128 features 16 us against 56.
FEW_ROTATED = 1 << 16


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: CacheLayer,
    window: int | None,
    scale: float | None,
) -> torch.Tensor | None:
    """Store the tokens k and v [batch, 1, groups, size] and attend: q and the result [batch, 1, heads, size].

    Where this cannot be done, nothing is, and the result is None.
    """
    _, seq, heads, size = q.shape
    if seq != 1 or not _takes(q, size):
        return None
    if not (_has_heads_in_a_row(q) and _has_heads_in_a_row(k) and _has_heads_in_a_row(v)):
        return None
    strides = q.stride(0), k.stride(0), v.stride(0)
    return _attend((q, k, v), strides, (len(q), heads, k.shape[2], size), layer, window, scale)


def attend_rotated(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    groups: int,
    layer: CacheLayer,
    window: int | None,
    scale: float | None,
) -> torch.Tensor | None:
    """Rotate q and k and do what `attend` does: qkv [batch, 1, (heads + 2 * groups) * size], float32 tables [batch or 1, 1, 1, size].

    Places are found by adding up, as views would cost as much as all the rest.
    """
    batch, seq, width = qkv.shape
    size = width // (heads + 2 * groups)
    if seq != 1 or not _takes(qkv, size) or not qkv.is_contiguous():
        return None
    if cos.dtype != torch.float32 or cos.numel() not in (size, batch * size) or not _are_whole(cos, sin):
        return None
    assert NATIVE is not None
    rotated = torch.empty((batch, heads + groups, size), dtype=torch.bfloat16)
    next_table, next_rotated = 0 if cos.numel() == size else size, (heads + groups) * size
    NATIVE.rotate(batch, heads + groups, size, width, next_table, qkv, cos, sin, rotated)
    operands = rotated, (rotated, BYTES * heads * size), (qkv, BYTES * next_rotated)
    strides = next_rotated, next_rotated, width
    return _attend(operands, strides, (batch, heads, groups, size), layer, window, scale)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """Rotate few tokens: x and the result [batch, seq, heads, size], float32 tables [batch, seq, 1, size] or of one token. None where this cannot be done."""
    batch, seq, heads, size = x.shape
    rows = batch * seq
    if not _reads(x) or cos.dtype != torch.float32 or cos.shape[-1] != size:
        return None
    if not (0 < x.numel() <= FEW_ROTATED and _are_whole(x, cos, sin) and cos.numel() in (size, rows * size)):
        return None
    assert NATIVE is not None
    y = torch.empty_like(x)
    next_table = 0 if cos.numel() == size else size
    NATIVE.rotate(rows, heads, size, heads * size, next_table, x, cos, sin, y)
    return y


def _are_whole(*tensors: torch.Tensor) -> bool:
    return all(map(torch.Tensor.is_contiguous, tensors))


def _takes(x: torch.Tensor, size: int) -> bool:
    return _reads(x) and len(x) > 0 and size % VECTOR == 0 and 0 < size <= MOST


def _reads(x: torch.Tensor) -> bool:
    """Whether C can read a tensor: a GPU's back end has the kernels of this one for what it has none of its own."""
    return NATIVE is not None and x.dtype == torch.bfloat16 and x.is_cpu


def _attend(
    operands: tuple[Operand, Operand, Operand],
    strides: tuple[int, int, int],
    sizes: tuple[int, int, int, int],
    layer: CacheLayer,
    window: int | None,
    scale: float | None,
) -> torch.Tensor | None:
    """`attend` for q, k and v, sequences so many elements apart; sizes are batch, heads, groups and size."""
    assert NATIVE is not None
    storage = layer.reserve_one() if sees_all(layer, window) else None
    if storage is None:
        return None
    batch, heads, groups, size = sizes
    y = torch.empty((batch, 1, heads, size), dtype=torch.bfloat16)
    NATIVE.append_and_attend(
        batch,
        groups,
        heads // groups,
        size,
        storage.keys.shape[2],
        min((limit for limit in (window, layer.window) if limit is not None), default=0),
        *strides,
        torch.get_num_threads(),
        size**-0.5 if scale is None else scale,
        *operands,
        storage.keys,
        storage.values,
        layer.lengths.counts(),
        y,
    )
    return y


def sees_all(layer: CacheLayer, window: int | None) -> bool:
    """Whether a query sees all that a layer holds whose newer tokens lie over older ones."""
    return window is None or layer.window is None or window >= layer.window


def _has_heads_in_a_row(x: torch.Tensor) -> bool:
    return x.stride(3) == 1 and (x.stride(2) == x.shape[3] or x.shape[2] == 1)
