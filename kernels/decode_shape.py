# SPDX-License-Identifier: Apache-2.0
"""Sizes of one query for each sequence over a cache, and the definition that `attention_decode.py` is held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from nnfront_kernels import rope_append
from nnfront_kernels.attention import Scores
from nnfront_kernels.cache import example_cache, stored_tokens
from nnfront_kernels.common import empties


@dataclass(frozen=True)
class DecodeShape:
    """One query of `heads` heads for each sequence. `longest` bounds the lengths; page 0 is a contiguous cache."""

    batch: int
    heads: int
    kv_heads: int
    size: int
    longest: int
    page: int = 0
    window: int = 0
    value_size: int = 0  # 0 is size
    fp8: bool = False  # the cache is in 8 bits
    new: bool = False  # the query's own token is rotated and stored first


def reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    pages: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    new_keys: torch.Tensor | None = None,
    new_values: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    compute: torch.dtype = torch.float32,
    **given: Any,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`, sequence by sequence; a new token is in a copy of the cache."""
    if new_keys is not None and new_values is not None:
        before = lengths - 1
        there = {"pages": pages, "key_scales": key_scales, "value_scales": value_scales}
        turned, keys, values, *scales = rope_append.reference(
            q[:, None], new_keys[:, None], new_values[:, None], cos, sin, before, keys, values,
            **there, interleaved=interleaved, compute=compute,
        )  # fmt: skip
        q = turned[:, 0]
        key_scales, value_scales = scales or (None, None)
    y = torch.zeros(*q.shape[:2], values.shape[3], dtype=q.dtype, device=q.device)
    scores = Scores(**given)
    for sequence, length in enumerate(lengths.tolist()):
        if length:
            k = stored_tokens(keys, key_scales, pages, sequence, length, compute)
            v = stored_tokens(values, value_scales, pages, sequence, length, compute)
            y[sequence] = scores.row(q[sequence].to(compute), k, v, length - 1, (sequence, 0))
    return y


def example(shape: DecodeShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `plan` with the sizes of a shape, without values."""
    make = empties(dtype, device)
    options: dict[str, Any] = {"window": shape.window or None}
    sizes = (shape.size, shape.value_size or shape.size)
    kind = "float8_e4m3fn" if shape.fp8 else dtype
    cache, there = example_cache(shape.batch, shape.kv_heads, shape.longest, sizes, shape.page, kind, device)
    q, options = make(shape.batch, shape.heads, shape.size), options | there
    if shape.new:
        heads, group = shape.heads, shape.kv_heads
        widths = (heads * shape.size, group * shape.size, group * sizes[1])
        parts = make(shape.batch, sum(widths)).split(widths, 1)
        q, new_k, new_v = (x.unflatten(1, (n, -1)) for x, n in zip(parts, (heads, group, group), strict=True))
        options |= {"new_keys": new_k, "new_values": new_v}
        options |= {name: make(shape.batch, 1, shape.size // 2, kind="float32") for name in ("cos", "sin")}
    return (q, *cache, make(shape.batch, kind="int32")), options
