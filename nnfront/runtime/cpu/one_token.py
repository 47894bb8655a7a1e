# SPDX-License-Identifier: Apache-2.0
"""What one token of each sequence costs besides products, in C: rope, storing it in the cache, attention.

Between products that leave nothing in the caches each call of torch costs several times what it does: 12 heads of 64 in 2 groups at 540 tokens take
75 to 96 us in torch's flash attention and 27 here, 32 heads in 8 groups 160 and 60 (2 threads, EPYC with AVX512_BF16).
"""

from __future__ import annotations

import torch

from nnfront.runtime.cache.layer import CacheLayer
from nnfront.runtime.cpu.extension import NATIVE

# Features of a head: a multiple of what a vector holds, up to what stays in registers.
VECTOR, MOST = 32, 256


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
    batch, seq, heads, size = q.shape
    if NATIVE is None or seq != 1 or not batch or q.dtype != torch.bfloat16 or size % VECTOR or size > MOST:
        return None
    if not (_has_heads_in_a_row(q) and _has_heads_in_a_row(k) and _has_heads_in_a_row(v)):
        return None
    storage = layer.reserve_in_order()
    if storage is None:
        return None
    lengths, groups = layer.lengths.counts(), k.shape[2]
    y = torch.empty((batch, 1, heads, size), dtype=torch.bfloat16)
    NATIVE.append_and_attend(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        storage.keys.data_ptr(),
        storage.values.data_ptr(),
        lengths.data_ptr(),
        y.data_ptr(),
        batch,
        groups,
        heads // groups,
        size,
        storage.keys.shape[2],
        min((limit for limit in (window, layer.window) if limit is not None), default=0),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        torch.get_num_threads(),
        size**-0.5 if scale is None else scale,
    )
    return y


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """Rotate x [batch, 1, heads, size] by tables [batch or 1, 1, 1, size] in float32, or return None."""
    batch, seq, heads, size = x.shape
    is_known = NATIVE is not None and x.dtype == torch.bfloat16 and cos.dtype == torch.float32
    if not is_known or seq != 1 or not _has_heads_in_a_row(x) or cos.numel() not in (size, batch * size):
        return None
    y = torch.empty((batch, 1, heads, size), dtype=torch.bfloat16)
    next_table = 0 if cos.numel() == size else size
    assert NATIVE is not None
    NATIVE.rotate(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        y.data_ptr(),
        batch,
        heads,
        size,
        x.stride(0),
        next_table,
    )
    return y


def _has_heads_in_a_row(x: torch.Tensor) -> bool:
    return x.stride(3) == 1 and (x.stride(2) == x.shape[3] or x.shape[2] == 1)
