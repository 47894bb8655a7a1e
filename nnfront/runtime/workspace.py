# SPDX-License-Identifier: Apache-2.0
"""What the CPU's kernels hold while they run, besides operands and results: bytes at the moment when they hold most.

Kernels that are an op's reference need no entry: `nnfront.lower.footprint` meters those. A figure is what torch allocates, as its
profiler counts it. What a library keeps for each thread (100 to 250 KiB in oneDNN and in flash attention) is left out. Attention
to a cache is planned for an empty one: masks over the tokens that it holds already are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from nnfront import dtypes
from nnfront.lower import Run
from nnfront.lower.footprint import Workspace
from nnfront.lower.layout import Layer, Layout, contiguous
from nnfront.runtime.attention import BLOCK, FOLDED
from nnfront.runtime.cpu import PIECE


def _nothing(run: Run, *operands: object) -> int:
    return 0


def _rms_norm_last(run: Run, x: Layout, weight: Layout | None, bias: None) -> int:
    """For a half type the result in float32, unless there is one row only."""
    is_row = x.count == x.shape[-1] and weight is not None
    return 4 * x.count if x.is_half and not is_row else 0


def _rope_tables(run: Run, cos: Layout, sin: Layout) -> int:
    """The negated sines, and both tables if they have to be converted."""
    wide = cos.count * dtypes.size_bytes(run.attrs["dtype"])
    return wide if cos.dtype == run.attrs["dtype"] else 3 * wide


def _rope_rotated(run: Run, x: Layout, cos: Layout, sin: Layout) -> int:
    """For a half type what is rotated and its result in float32; where a part of the features is rotated, that part."""
    rotated = x.count // max(x.shape[-1], 1) * cos.shape[-1]
    wide = rotated * cos.item if x.dtype != cos.dtype else 0
    if cos.shape[-1] == x.shape[-1]:
        return 2 * wide
    return max(2 * wide - x.size_bytes, wide) + rotated * x.item


def _linear_wide(run: Run, x: Layout, weight: Layout, bias: Layout | None) -> int:
    """x in float32, a piece of the weight in float32, and the product with it."""
    rows, columns = weight.shape
    piece = min(max(PIECE // max(columns, 1), 1), rows)
    widened = sum(
        count for count, like in ((x.count, x), (piece * columns, weight)) if like.dtype != "float32"
    )
    return 4 * (widened + x.count // max(columns, 1) * piece)


def _window_mask(q: Layout) -> int:
    """The mask of a window, and what it is made from before the result is there."""
    pairs = q.shape[1] ** 2
    return pairs * q.item + max(2 * pairs - q.size_bytes, 0)


def _in_blocks(q: Layout, groups: int) -> int:
    """Of a block of queries: its mask, the queries themselves and the result, in the order in which they are computed."""
    batch, seq, heads, size = q.shape
    count = min(BLOCK, seq)
    return (count * seq * heads // groups + 2 * batch * count * heads * size) * q.item


def _attention_fused(run: Run, q: Layout, k: Layout, *operands: object) -> int:
    """A block at a time; in a window that hides anything the mask of it."""
    window, seq = run.attrs.get("window"), q.shape[1]
    if window is not None and window < seq:
        return _window_mask(q)
    is_blocked = run.attrs.get("is_causal", True) and seq == k.shape[1] and seq > FOLDED
    return _in_blocks(q, k.shape[2]) if is_blocked else 0


def _attention_cached(run: Run, q: Layout, k: Layout, v: Layout, layer: Layer, sinks: None) -> int:
    """As without a cache; and keys and values of the new tokens, if the ring cannot hold them."""
    seq = q.shape[1]
    windows = [w for w in (run.attrs.get("window"), layer.window) if w is not None]
    if seq == 1:
        return 0
    if min(windows, default=seq) >= seq:
        return _in_blocks(q, k.shape[2]) if seq > FOLDED else 0
    return _window_mask(q) + (k.size_bytes + v.size_bytes if layer.capacity < seq else 0)


def _qkv_attention(run: Run, qkv: Layout, cos: Layout, sin: Layout, layer: Layer | None, sinks: None) -> int:
    """Rotated q and k, and first what rotating them takes, then what attention takes."""
    heads, groups = run.attrs["heads"], run.attrs["groups"]
    batch, seq, width = qkv.shape
    q, k, rotated = (
        contiguous((batch, seq, n, width // (heads + 2 * groups)), qkv.dtype)
        for n in (heads, groups, heads + groups)
    )
    attending = _attention_fused(run, q, k) if layer is None else _attention_cached(run, q, k, k, layer, None)
    return rotated.size_bytes + max(_rope_rotated(run, rotated, cos, sin) - q.size_bytes, attending)


def _gated_product(run: Run, x: Layout, weight: Layout, bias: Layout | None) -> int:
    """One of gate and up; of one row both."""
    half = x.count // x.shape[-1] * weight.shape[0] // 2 * x.item if x.count else 0
    return 2 * half if x.count == x.shape[-1] else half


def _sdpa_fused(run: Run, q: Layout, k: Layout, v: Layout, mask: Layout | None) -> int:
    """The causal mask, and what it makes of the given one."""
    if mask is None or not run.attrs.get("is_causal", False):
        return 0
    pairs = q.shape[1] * k.shape[1]
    return pairs + max(mask.count, pairs) * mask.item


WORKSPACES: Mapping[str, Workspace] = {
    "linear_plain": _nothing,
    "linear_bfloat16": _nothing,
    "linear_float32": _nothing,
    "linear_wide": _linear_wide,
    "rms_norm_last": _rms_norm_last,
    "rope_tables": _rope_tables,
    "rope_rotated": _rope_rotated,
    "gated_product": _gated_product,
    "qkv_attention": _qkv_attention,
    "attention_cached": _attention_cached,
    "attention_fused": _attention_fused,
    "sdpa_fused": _sdpa_fused,
}
"""For each kernel that is more than a reference: from the instruction and its operands to bytes."""
