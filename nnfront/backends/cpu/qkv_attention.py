# SPDX-License-Identifier: Apache-2.0
"""Attention of a fused projection on a CPU: q and k rotated at once, k and v appended, attention; a few tokens of all of it in C."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nnfront.backends.cpu import attention, attention_memory
from nnfront.backends.cpu.attention_kinds import softmax_only
from nnfront.backends.cpu.in_c import kernel
from nnfront.backends.cpu.rope import rope_rotated, rope_rotated_bytes, rope_tables
from nnfront.backends.cpu.tape_attention import write_qkv_attention
from nnfront.backends.kernel import ACCEPTED, Context
from nnfront.lower import Run
from nnfront.memory.layout import Layer, Layout, contiguous
from nnfront.state.layer import CacheLayer


def _as_rotated_attention(run: Run, context: Context) -> Run | str:
    """Attention after rope by such tables, its heads as attributes."""
    qkv, cos, sin, *rest = run.inputs
    width, y = context.tensor(qkv).shape[-1], context.tensor(run.outputs[0])
    heads, size = y.shape[2:]
    if not (isinstance(width, int) and isinstance(heads, int) and isinstance(size, int)):
        return "the number of heads is no constant"
    attrs = {**run.attrs, "heads": heads, "groups": (width // size - heads) // 2}
    return replace(run, inputs=(qkv, *rope_tables(run, qkv, cos, sin, context), *rest), attrs=attrs)


def _caches(run: Run, context: Context) -> str:
    return softmax_only(run, context) if context.is_none(run.inputs[3]) else ACCEPTED


def _qkv_attention(run: Run) -> Callable[..., Any]:
    """Rotate q and k, which lie next to each other, at once; append k and v to the cache, if there is one; attend.

    Shapes: qkv [batch, seq, (heads + 2 * groups) * size], y [batch, seq, heads, size].
    """
    rotate, with_cache, without = rope_rotated(run), attention.cached(run), attention.fused(run)
    heads, groups = run.attrs["heads"], run.attrs["groups"]

    def qkv_attention(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: CacheLayer | None,
        sinks: torch.Tensor | None,
    ) -> Any:
        parts = qkv.view(*qkv.shape[:2], heads + 2 * groups, -1)
        q, k = rotate(parts.narrow(2, 0, heads + groups), cos, sin).split((heads, groups), 2)
        v = parts.narrow(2, heads + groups, groups)
        attend = without if layer is None else with_cache
        return attend(q, k, v, layer, sinks)

    return qkv_attention


def _heads(run: Run, qkv: Layout) -> tuple[Layout, Layout, Layout]:
    """q, k, and both next to each other."""
    heads, groups = run.attrs["heads"], run.attrs["groups"]
    batch, seq, width = qkv.shape
    size = width // (heads + 2 * groups)
    q, k, both = (contiguous((batch, seq, n, size), qkv.dtype) for n in (heads, groups, heads + groups))
    return q, k, both


def _qkv_attention_bytes(
    run: Run, qkv: Layout, cos: Layout, sin: Layout, layer: Layer | None, sinks: Layout | None
) -> int:
    """Rotated q and k, and first what rotating them takes, then what attention takes."""
    q, k, both = _heads(run, qkv)
    attending = (
        attention_memory.fused_bytes(run, q, k)
        if layer is None
        else attention_memory.cached_bytes(run, q, k, k, layer, sinks)
    )
    return both.size_bytes + max(rope_rotated_bytes(run, both, cos, sin) - q.size_bytes, attending)


def _remembered_by_qkv(
    run: Run, qkv: Layout, cos: Layout, sin: Layout, layer: Layer | None, sinks: Layout | None
) -> int:
    """The mask that attention remembers."""
    q, k, _ = _heads(run, qkv)
    return 0 if layer is None else attention_memory.mask_bytes(run, q, k, k, layer, sinks)


KERNELS = (
    kernel(
        "qkv_attention",
        "qkv_attention",
        write_qkv_attention,
        _qkv_attention,
        "q and k rotated at once",
        _caches,
        _as_rotated_attention,
        held=_qkv_attention_bytes,
        remembered=_remembered_by_qkv,
    ),
)
