# SPDX-License-Identifier: Apache-2.0
"""What decode attention does besides where it is given the new token: rotate the query, and store the token's key, rotated, and value.

One launch less for each layer. All blocks of a sequence rotate its query; the token is stored by the block whose steps end with it, before it reads any. Blocks
for other heads of the same key head store the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.cache import slots_of
from nnfront_kernels.common import Config, KernelError, strides
from nnfront_kernels.rope import blocks, require_angles, require_heads, turn
from nnfront_kernels.rope_append import scales_of


def angles(cos: torch.Tensor | None, sin: torch.Tensor | None, batch: int) -> tuple[int, dict[str, Any]]:
    """How many pairs are rotated, and the arguments: cos and sin with their strides. Raise KernelError unless they fit."""
    if cos is None or sin is None:
        if cos is not sin:
            raise KernelError("without a rotation there is neither cos nor sin")
        return 0, {"cos_ptr": None, "sin_ptr": None, "stride_cb": 0, "stride_sb": 0}
    cos, sin = require_angles(cos, sin, batch, 1)
    return cos.shape[-1], {"cos_ptr": cos, "sin_ptr": sin, **strides("c", cos, "b"), **strides("s", sin, "b")}


def new_token(
    q: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cache: tuple[torch.Tensor, torch.Tensor],
    *,
    interleaved: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kernel's arguments and constants for a new token, keys [batch, kv_heads, size] and values, or for none. Raise KernelError unless it fits."""
    if keys is None or values is None:
        if keys is not values or cos is not None or sin is not None:
            raise KernelError("a new token has new_keys and new_values, and only such a one is rotated")
        pairs, given = angles(None, None, len(q))
        made = {"new_k_ptr": None, "new_v_ptr": None, **{f"stride_new_{n}{a}": 0 for n in "kv" for a in "bh"}}
    else:
        heads, size, value_size = cache[0].shape[1], cache[0].shape[3], cache[1].shape[3]
        require_heads("new_keys", keys[:, None], (len(q), 1, heads, size), q.dtype)
        require_heads("new_values", values[:, None], (len(q), 1, heads, value_size), q.dtype)
        pairs, given = angles(cos, sin, len(q))
        if 2 * pairs > size:
            raise KernelError(f"at most {size // 2} pairs fit in a head of {size}, got {pairs}")
        made = {
            "new_k_ptr": keys,
            "new_v_ptr": values,
            **strides("new_k", keys, "bh"),
            **strides("new_v", values, "bh"),
        }
    sizes = blocks(cache[0].shape[3], pairs, interleaved, Config(1, 1, 1, 4, 1))
    constants = {
        "PAIRS": pairs,
        "INTERLEAVED": interleaved,
        "BLOCK_P": sizes["BLOCK_P"],
        "BLOCK_R": sizes["BLOCK_R"],
    }
    return {**made, **given}, constants


@triton.jit
def rotated_rows(
    q, rows, inside, dk, cos_row, sin_row, PAIRS: tl.constexpr, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """q [BLOCK_M, BLOCK_DK], which lies at `rows` [BLOCK_M, 1], with its first pairs rotated; rounded as it was."""
    if INTERLEAVED:
        pair = dk // 2
        first = dk % 2 == 0
        partner = dk ^ 1
    else:
        first = dk < PAIRS
        pair = tl.where(first, dk, dk - PAIRS)
        partner = tl.where(first, dk + PAIRS, dk - PAIRS)
    turned = dk < 2 * PAIRS
    other = tl.load(rows + partner, mask=inside & turned, other=0.0).to(tl.float32)
    cos = tl.load(cos_row + pair, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_row + pair, mask=turned, other=0.0).to(tl.float32)
    return (q.to(tl.float32) * cos + other * tl.where(first, -sin, sin)).to(q.dtype)


@triton.jit
def store_token(
    new_k_ptr,  # of this sequence and head
    new_v_ptr,
    keys_ptr,  # of the first slot of the first page, for this head
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    pages_ptr,
    stride_pages,
    sequence,
    position,
    capacity,
    cos_row,
    sin_row,
    stride_kp, stride_ks,
    stride_vp, stride_vs,
    stride_ksp,
    stride_vsp,
    SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Write the key, rotated, and the value of one token and head where the cache has room for them."""
    one = tl.arange(0, 1)[:, None]
    page, slot = slots_of(pages_ptr, stride_pages, sequence, position, position < capacity, PAGE)
    if key_scales_ptr is not None:  # two codes are read at a time, and written one by one
        key_bytes = keys_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        value_bytes = values_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        key_rows = key_bytes + 2 * (page * stride_kp + slot * stride_ks)
        value_rows = value_bytes + 2 * (page * stride_vp + slot * stride_vs)
    else:
        key_rows = keys_ptr + page * stride_kp + slot * stride_ks
        value_rows = values_ptr + page * stride_vp + slot * stride_vs
    if page >= 0:
        turn(
            new_k_ptr + one, key_rows + one,
            scales_of(key_scales_ptr, page, slot, one, stride_ksp, 0) if key_scales_ptr is not None else None,
            one == 0, cos_row, sin_row, SIZE_K, PAIRS, INTERLEAVED, 1, BLOCK_P, BLOCK_R
        )  # fmt: skip
        turn(
            new_v_ptr + one, value_rows + one,
            scales_of(value_scales_ptr, page, slot, one, stride_vsp, 0) if value_scales_ptr is not None else None,
            one == 0, None, None, SIZE_V, 0, False, 1, 1, BLOCK_DV
        )  # fmt: skip
    # Other threads of the block read what was written.
    tl.debug_barrier()
