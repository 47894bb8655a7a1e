# SPDX-License-Identifier: Apache-2.0
"""The sizes of attention of many queries, and tensors of these sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nnfront_kernels.common import empties
from nnfront_kernels.tiles import cdiv


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
    tokens, total, values = shape.batch * shape.seq, shape.before + shape.seq, shape.value_size or shape.size
    options: dict[str, Any] = {"longest": shape.seq, "window": shape.window or None, "causal": shape.causal}
    rows: tuple[int, ...] = (tokens, shape.kv_heads)
    if shape.page:
        per = cdiv(total, shape.page)
        options["pages"] = make(shape.batch, per, kind="int32")
        rows = (shape.batch * per, shape.kv_heads, shape.page)
    elif shape.before or shape.fp8:
        rows = (shape.batch, shape.kv_heads, total)
    if shape.before:
        options["before"] = make(shape.batch, kind="int32")
    kind = "float8_e4m3fn" if shape.fp8 else dtype
    for name in ("key_scales", "value_scales") if shape.fp8 else ():
        options[name] = make(*rows, kind="float32")
    q, starts = make(tokens, shape.heads, shape.size), make(shape.batch + 1, kind="int32")
    return (q, make(*rows, shape.size, kind=kind), make(*rows, values, kind=kind), starts), options
