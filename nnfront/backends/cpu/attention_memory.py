# SPDX-License-Identifier: Apache-2.0
"""What attention on a CPU holds while it runs: blocks of queries, their masks, and what the reference takes."""

from __future__ import annotations

from dataclasses import replace

from nnfront.lower import Run
from nnfront.memory.allocations import metered
from nnfront.memory.layout import Layer, Layout, contiguous

# Up to so many queries a head, groups are folded into queries; beyond, the masked half of the work costs more than it saves.
FOLDED = 8
# Tokens of a prompt that attend at a time. Between 32 and 128 it makes little difference.
BLOCK = 64
# Keys that a block attends to at a time: torch lays them out anew, with their values.
NEAR = 2048


def as_op(run: Run) -> Run:
    """The instruction, of the op or of a region, as one of the op."""
    names = ("scale", "is_causal", "window", "softcap", "value_size")
    attrs = {name: run.attrs[name] for name in names if name in run.attrs}
    return replace(run, kernel="attention", op="attention", attrs=attrs)


def _window_mask_bytes(q: Layout) -> int:
    """The mask of a window, and what it is made from before the result is there."""
    pairs = q.shape[1] ** 2
    return pairs * q.item + max(2 * pairs - q.size_bytes, 0)


def _block_bytes(q: Layout) -> int:
    """Of a block of queries the queries themselves and the result, in the order in which they are computed; where it attends in pieces two results of these, one of them in float32 twice."""
    batch, seq, heads, size = q.shape
    elements = batch * min(BLOCK, seq) * heads * size
    return elements * (2 * q.item + (8 if seq > NEAR else 0))


def _block_mask_bytes(q: Layout, groups: int) -> int:
    """The mask of a block that sees no more than what is near."""
    return min(BLOCK, q.shape[1]) * min(NEAR, q.shape[1]) * q.shape[2] // groups * q.item


def _is_general(run: Run, sinks: Layout | None) -> bool:
    return "softcap" in run.attrs or sinks is not None


def general_bytes(run: Run, *operands: Layout | Layer | None) -> int:
    """What the reference takes of a block of tokens, and its results until all are there."""
    q, k, v, layer, *rest = operands
    assert isinstance(q, Layout)
    is_whole = k is None or q.shape[1] <= BLOCK or not run.attrs.get("is_causal", True)
    if is_whole:
        return metered(as_op(run), operands, {}, (None, None)).workspace
    parts = (
        None if x is None else contiguous((x.shape[0], BLOCK, *x.shape[2:]), x.dtype)
        for x in (q, k, v)
        if not isinstance(x, Layer)
    )
    made = metered(as_op(run), (*parts, layer, *rest), {}, (None, None))
    return made.workspace + q.size_bytes


def fused_bytes(run: Run, q: Layout, k: Layout, *operands: object) -> int:
    """A block at a time; in a window that hides anything the mask of it."""
    window, seq = run.attrs.get("window"), q.shape[1]
    if window is not None and window < seq:
        return _window_mask_bytes(q)
    is_blocked = run.attrs.get("is_causal", True) and seq == k.shape[1] and seq > FOLDED
    return _block_bytes(q) + _block_mask_bytes(q, k.shape[2]) if is_blocked else 0


def _hides(run: Run, q: Layout, layer: Layer) -> bool:
    """Whether a window hides some of the new tokens from others."""
    windows = [w for w in (run.attrs.get("window"), layer.window) if w is not None]
    return min(windows, default=q.shape[1]) < q.shape[1]


def cached_bytes(
    run: Run, q: Layout, k: Layout, v: Layout, layer: Layer, sinks: Layout | None, bias: None = None
) -> int:
    """A block at a time; keys and values of the new tokens, if the ring cannot hold them."""
    if _is_general(run, sinks):
        return general_bytes(run, q, k, v, layer, sinks)
    if _hides(run, q, layer):
        return k.size_bytes + v.size_bytes if layer.capacity < q.shape[1] else 0
    return _block_bytes(q) if q.shape[1] > FOLDED else 0


def mask_bytes(
    run: Run, q: Layout, k: Layout, v: Layout, layer: Layer, sinks: Layout | None, bias: None = None
) -> int:
    """The mask of a block, or of a window that hides anything: all layers use it."""
    if _is_general(run, sinks):
        return 0
    if _hides(run, q, layer):
        return _window_mask_bytes(q)
    return _block_mask_bytes(q, k.shape[2]) if q.shape[1] > FOLDED else 0


def sdpa_fused_bytes(run: Run, q: Layout, k: Layout, v: Layout, mask: Layout | None) -> int:
    """The causal mask, and what it makes of the given one."""
    if mask is None or not run.attrs.get("is_causal", False):
        return 0
    pairs = q.shape[1] * k.shape[1]
    return pairs + max(mask.count, pairs) * mask.item
