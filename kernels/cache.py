# SPDX-License-Identifier: Apache-2.0
"""Where the keys and values of earlier tokens lie, for the kernels that write and read them.

Contiguous: keys [batch, kv_heads, capacity, size], sequence b at keys[b]. Paged: keys [num_pages, kv_heads, page, size] and
pages [batch, pages] int32; position p of sequence b is slot p % page of page pages[b, p // page]. A page may belong to
several sequences. Values are alike, with a size of their own. Both are adjacent along size, with any other strides.

In 8 bits: keys and values are float8_e4m3fn codes, and float32 key_scales and value_scales [batch or pages, kv_heads,
slots], adjacent along slots, hold for each token and head its largest magnitude / 448, or 1 for zeros: a code stands for
itself times its scale. No code is read as NaN: a token and head that is not finite has a scale that is not.

base int64 [4], if given, says how many times 16 bytes behind these tensors keys, values, key_scales and value_scales lie: it is read on the
device, so a captured launch serves every cache of one layout, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import KernelError, empties
from nnfront_kernels.quantized import FP8, FP8_MAX, FP8_SMALLEST
from nnfront_kernels.tiles import cdiv

PAGES = (16, 64, 128)


def example_cache(
    batch: int, heads: int, room: int, sizes: Sequence[int], page: int, kind: str, device: str
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Keys and values of these sizes, without what they hold, and the table and the scales beside them, as options. page 0 is contiguous."""
    make = empties(kind, device)
    options: dict[str, Any] = {}
    first, slots = batch, room
    if page:
        options["pages"] = make(batch, cdiv(room, page), kind="int32")
        first, slots = options["pages"].numel(), page
    for name in ("key_scales", "value_scales") if kind == "float8_e4m3fn" else ():
        options[name] = make(first, heads, slots, kind="float32")
    return [make(first, heads, slots, size) for size in sizes], options


def require_cache(
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor | None,
    batch: int,
    dtype: torch.dtype,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
) -> int:
    """How many positions a sequence may have. Raise KernelError unless this is a cache for `batch` sequences, of `dtype` or
    with scales in 8 bits; with a base, which may be that of others, it may be one for fewer, and a sequence that it does not hold is empty.
    """
    if key_scales is not None or value_scales is not None:
        _require_scales(keys, values, key_scales, value_scales)
        dtype = FP8
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
        if keys.shape[0] != batch and (base is None or keys.shape[0] > batch):
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


def _require_scales(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    for name, codes in (("keys", keys), ("values", values)):
        if any(stride % 2 for stride in codes.stride()[:3]) or codes.storage_offset() % 2:
            raise KernelError(
                f"{name} in 8 bits must start at even bytes, as two codes are read at a time, "
                f"got strides {list(codes.stride())} from {codes.storage_offset()}"
            )
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if scales is None:
            raise KernelError(f"{name} are missing: keys and values in 8 bits both have scales")
        if scales.dtype != torch.float32 or scales.shape != keys.shape[:3] or scales.stride(2) != 1:
            raise KernelError(
                f"{name} must be torch.float32 {list(keys.shape[:3])} with adjacent slots, "
                f"got {scales.dtype} {list(scales.shape)} with strides {list(scales.stride())}"
            )


def require_counts(name: str, tensor: torch.Tensor, size: int) -> None:
    """Raise KernelError unless `tensor` is a dense int32 [size]."""
    if tensor.shape != (size,) or tensor.dtype != torch.int32 or (size > 1 and tensor.stride(0) != 1):
        raise KernelError(f"{name} must be a dense int32 [{size}], got {tensor.dtype} {list(tensor.shape)}")


def require_base(base: torch.Tensor | None) -> None:
    """Raise KernelError unless there is none, or it is a dense int64 [4]."""
    if base is not None and (base.shape != (4,) or base.dtype != torch.int64 or base.stride(0) != 1):
        raise KernelError(f"base must be a dense int64 [4], got {base.dtype} {list(base.shape)}")


def pointers(
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor | None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    *,
    base: torch.Tensor | None = None,
    codes: torch.dtype = torch.uint8,
) -> dict[str, Any]:
    """The kernel arguments that describe a cache, one in 8 bits as integers of the type `codes`. Raise KernelError for a base that is none."""
    require_base(base)
    if key_scales is not None:
        keys, values = keys.view(codes), values.view(codes)
    strides = {
        f"stride_{name}{axis}": tensor.stride(index)
        for name, tensor in (("k", keys), ("v", values))
        for index, axis in enumerate("phs")
    }
    for name, scales in (("ks", key_scales), ("vs", value_scales)):
        for index, axis in enumerate("ph"):
            strides[f"stride_{name}{axis}"] = 0 if scales is None else scales.stride(index)
    return {
        "keys_ptr": keys,
        "values_ptr": values,
        "key_scales_ptr": key_scales,
        "value_scales_ptr": value_scales,
        "pages_ptr": pages,
        "base_ptr": base,
        "stride_pages": 0 if pages is None else pages.stride(0),
        **strides,
    }


@triton.jit
def moved(ptr, base_ptr, INDEX: tl.constexpr):
    """The pointer to where a buffer lies now; itself without a base, and without a buffer."""
    place = None  # Triton 3.6 returns no None that it was given, and has none in a tuple
    if ptr is not None:
        place = ptr
        if base_ptr is not None:
            place += tl.load(base_ptr + INDEX) * (128 // ptr.dtype.element_ty.primitive_bitwidth)
    return place


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


@triton.jit
def page_of_step(pages_ptr, stride_pages, sequence, first, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of the keys from `first` on: one for a step of keys that lies in one, else one for each key; -1 from `end` on.

    A step that is asked for a step ahead waits for no table: its keys are on their way while others are computed.
    """
    if pages_ptr is None:
        page = sequence.to(tl.int64)
    else:
        at = first if PAGE % BLOCK_N == 0 else first + tl.arange(0, BLOCK_N)
        row = pages_ptr + sequence.to(tl.int64) * stride_pages
        page = tl.load(row + at // PAGE, mask=at < end, other=-1).to(tl.int64)
    return page


@triton.jit
def step_rows(base_ptr, page, first, stride_p, stride_s, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers [BLOCK_N] to the keys from `first` on, whose page `page_of_step` gave."""
    lane = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:
        slot = first % PAGE if PAGE else first
        rows = base_ptr + (page * stride_p + slot.to(tl.int64) * stride_s) + lane * stride_s
    else:
        rows = base_ptr + (page * stride_p + ((first + lane) % PAGE) * stride_s)
    return rows


def gathered(stored: torch.Tensor, pages: torch.Tensor | None, sequence: int, length: int) -> torch.Tensor:
    """The first `length` tokens of a sequence: [kv_heads, length, ...]. For references."""
    if pages is None:
        return stored[sequence, :, :length]
    page = stored.shape[2]
    used = pages[sequence, : -(-length // page)].long()
    return stored[used].transpose(0, 1).flatten(1, 2)[:, :length]


def stored_tokens(
    stored: torch.Tensor,
    scales: torch.Tensor | None,
    pages: torch.Tensor | None,
    sequence: int,
    length: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What the first `length` tokens of a sequence stand for: [kv_heads, length, size] in `dtype`. For references."""
    found = gathered(stored, pages, sequence, length).to(dtype)
    if scales is None:
        return found
    return found * gathered(scales, pages, sequence, length).to(dtype)[..., None]


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., size] as codes, and their scales [...] float32: 1 where nothing is as large as 2^-100. For references."""
    largest = x.float().abs().amax(-1)
    largest = torch.where(largest < FP8_SMALLEST, FP8_MAX, largest)
    scaled = x.float() * (torch.full_like(largest, FP8_MAX) / largest)[..., None]
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8), largest / FP8_MAX
