# SPDX-License-Identifier: Apache-2.0
"""The sizes of attention of many queries, and tensors of these sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nnfront_kernels.cache import example_cache
from nnfront_kernels.common import empties


@dataclass(frozen=True)
class PrefillShape:
    """`seq` queries of each of `batch` sequences, after `before` tokens in a cache; page 0 is no table of pages."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    size: int
    value_size: int = 0  # 0 is size
    before: int = 0
    page: int = 0
    window: int = 0
    causal: bool = True
    fp8: bool = False  # the cache is in 8 bits


def example(shape: PrefillShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `plan` with the sizes of a shape, without values."""
    make = empties(dtype, device)
    tokens, sizes = shape.batch * shape.seq, (shape.size, shape.value_size or shape.size)
    options: dict[str, Any] = {"longest": shape.seq, "window": shape.window or None, "causal": shape.causal}
    kept = [make(tokens, shape.kv_heads, size) for size in sizes]
    if shape.page or shape.before or shape.fp8:
        room, kind = shape.before + shape.seq, "float8_e4m3fn" if shape.fp8 else dtype
        kept, there = example_cache(shape.batch, shape.kv_heads, room, sizes, shape.page, kind, device)
        options |= there
    if shape.before:
        options["before"] = make(shape.batch, kind="int32")
    q, starts = make(tokens, shape.heads, shape.size), make(shape.batch + 1, kind="int32")
    return (q, *kept, starts), options
