# SPDX-License-Identifier: Apache-2.0
"""Where the keys and values of earlier tokens lie, for the kernels that write and read them.

Contiguous: keys [batch, kv_heads, capacity, size], sequence b at keys[b]. Paged: keys [num_pages, kv_heads, page, size] and
pages [batch, pages] int32; position p of sequence b is slot p % page of page pages[b, p // page]. A page may belong to
several sequences. Values are alike, with a size of their own. Both are adjacent along size, with any other strides.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import KernelError

PAGES = (16, 64, 128)


def require_cache(
    keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor | None, batch: int, dtype: torch.dtype
) -> int:
    """How many positions a sequence may have. Raise KernelError unless this is a cache for `batch` sequences."""
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.ndim != 4 or tensor.stride(3) != 1:
            raise KernelError(
                f"{name} must be [batch or pages, kv_heads, slots, size] with adjacent elements, "
                f"got {list(tensor.shape)} with strides {list(tensor.stride())}"
            )
        if tensor.dtype != dtype:
            raise KernelError(f"{name} must be {dtype}, got {tensor.dtype}")
    if keys.shape[:3] != values.shape[:3]:
        raise KernelError(
            f"keys and values must agree except for size, got {list(keys.shape)} and {list(values.shape)}"
        )
    if pages is None:
        if keys.shape[0] != batch:
            raise KernelError(f"keys must hold {batch} sequences, got {keys.shape[0]}")
        return keys.shape[2]
    if keys.shape[2] not in PAGES:
        raise KernelError(f"a page must hold one of {', '.join(map(str, PAGES))} tokens, got {keys.shape[2]}")
    if pages.ndim != 2 or pages.shape[0] != batch or pages.dtype != torch.int32 or pages.stride(1) != 1:
        raise KernelError(
            f"pages must be int32 [{batch}, pages] with adjacent elements, "
            f"got {pages.dtype} {list(pages.shape)} with strides {list(pages.stride())}"
        )
    return pages.shape[1] * keys.shape[2]


def require_counts(name: str, tensor: torch.Tensor, size: int) -> None:
    """Raise KernelError unless `tensor` is a dense int32 [size]."""
    if tensor.shape != (size,) or tensor.dtype != torch.int32 or (size > 1 and tensor.stride(0) != 1):
        raise KernelError(f"{name} must be a dense int32 [{size}], got {tensor.dtype} {list(tensor.shape)}")


def pointers(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor | None) -> dict[str, Any]:
    """The kernel arguments that describe a cache."""
    strides = {
        f"stride_{name}{axis}": tensor.stride(index)
        for name, tensor in (("k", keys), ("v", values))
        for index, axis in enumerate("phs")
    }
    table = 0 if pages is None else pages.stride(0)
    return {"keys_ptr": keys, "values_ptr": values, "pages_ptr": pages, "stride_pages": table, **strides}


@triton.jit
def slots_of(pages_ptr, stride_pages, sequence, position, inside, PAGE: tl.constexpr):
    """Page and slot of positions of a sequence, int64. Without a table the sequence is the page. -1 is no page."""
    if pages_ptr is None:
        page = tl.where(inside, sequence, -1).to(tl.int64)
        slot = position.to(tl.int64)
    else:
        row = pages_ptr + sequence.to(tl.int64) * stride_pages
        page = tl.load(row + position // PAGE, mask=inside, other=-1).to(tl.int64)
        slot = (position % PAGE).to(tl.int64)
    return page, slot


def gathered(stored: torch.Tensor, pages: torch.Tensor | None, sequence: int, length: int) -> torch.Tensor:
    """The first `length` tokens of a sequence: [kv_heads, length, size]. For references."""
    if pages is None:
        return stored[sequence, :, :length]
    page = stored.shape[2]
    used = pages[sequence, : -(-length // page)].long()
    return stored[used].transpose(0, 1).flatten(1, 2)[:, :length]
