# SPDX-License-Identifier: Apache-2.0
"""What the CPU's kernels hold while they run, besides operands and results: bytes at the moment when they hold most.

Kernels that are an op's reference need no entry: `nnfront.memory.allocations` meters those. A figure is what torch allocates, as its
profiler counts it. What a library keeps for each thread (100 to 250 KiB in oneDNN and in flash attention) is left out. Attention
to a cache is planned for an empty one: masks over the tokens that it holds already are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nnfront import dtypes
from nnfront.backends.cpu import quantized_linear as quantized
from nnfront.backends.cpu.activations import GATES, activation_name
from nnfront.backends.cpu.attention import BLOCK, FOLDED
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.gemv import FEW_ROWS
from nnfront.backends.cpu.kernels import PIECE, gated_few_rows
from nnfront.backends.cpu.norm import FEW
from nnfront.lower import Run
from nnfront.memory.allocations import MemoryPolicy, Workspace
from nnfront.memory.layout import Layer, Layout, contiguous


def _nothing(run: Run, *operands: object) -> int:
    return 0


def _rms_norm_last(run: Run, x: Layout, weight: Layout | None, bias: None) -> int:
    """For a half type the result in float32, unless there is one row only, or C takes them."""
    is_row = x.count == x.shape[-1] and weight is not None
    if NATIVE and x.dtype == "bfloat16" and weight is not None and x.count <= FEW:
        return 0
    return 4 * x.count if x.is_half and not is_row else 0


def _rms_norm_of_sum(run: Run, x: Layout, residual: Layout, weight: Layout | None, bias: None) -> int:
    """What the norm holds, and the sum if nobody else reads it."""
    return _rms_norm_last(run, x, weight, None) + (0 if len(run.outputs) == 2 else x.count * x.item)


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


def _block(q: Layout) -> int:
    """Of a block of queries the queries themselves and the result, in the order in which they are computed."""
    batch, seq, heads, size = q.shape
    return 2 * batch * min(BLOCK, seq) * heads * size * q.item


def _block_mask(q: Layout, groups: int) -> int:
    """The mask of a block."""
    return min(BLOCK, q.shape[1]) * q.shape[1] * q.shape[2] // groups * q.item


def _attention_fused(run: Run, q: Layout, k: Layout, *operands: object) -> int:
    """A block at a time; in a window that hides anything the mask of it."""
    window, seq = run.attrs.get("window"), q.shape[1]
    if window is not None and window < seq:
        return _window_mask(q)
    is_blocked = run.attrs.get("is_causal", True) and seq == k.shape[1] and seq > FOLDED
    return _block(q) + _block_mask(q, k.shape[2]) if is_blocked else 0


def _hides(run: Run, q: Layout, layer: Layer) -> bool:
    """Whether a window hides some of the new tokens from others."""
    windows = [w for w in (run.attrs.get("window"), layer.window) if w is not None]
    return min(windows, default=q.shape[1]) < q.shape[1]


def _attention_cached(run: Run, q: Layout, k: Layout, v: Layout, layer: Layer, sinks: None) -> int:
    """A block at a time; keys and values of the new tokens, if the ring cannot hold them."""
    if _hides(run, q, layer):
        return k.size_bytes + v.size_bytes if layer.capacity < q.shape[1] else 0
    return _block(q) if q.shape[1] > FOLDED else 0


def _remembered_mask(run: Run, q: Layout, k: Layout, v: Layout, layer: Layer, sinks: None) -> int:
    """The mask of a block, or of a window that hides anything: all layers use it."""
    if _hides(run, q, layer):
        return _window_mask(q)
    return _block_mask(q, k.shape[2]) if q.shape[1] > FOLDED else 0


def _heads(run: Run, qkv: Layout) -> tuple[Layout, Layout, Layout]:
    """q, k, and both next to each other."""
    heads, groups = run.attrs["heads"], run.attrs["groups"]
    batch, seq, width = qkv.shape
    size = width // (heads + 2 * groups)
    q, k, both = (contiguous((batch, seq, n, size), qkv.dtype) for n in (heads, groups, heads + groups))
    return q, k, both


def _qkv_attention(run: Run, qkv: Layout, cos: Layout, sin: Layout, layer: Layer | None, sinks: None) -> int:
    """Rotated q and k, and first what rotating them takes, then what attention takes."""
    q, k, both = _heads(run, qkv)
    attending = _attention_fused(run, q, k) if layer is None else _attention_cached(run, q, k, k, layer, None)
    return both.size_bytes + max(_rope_rotated(run, both, cos, sin) - q.size_bytes, attending)


def _remembered_by_qkv(
    run: Run, qkv: Layout, cos: Layout, sin: Layout, layer: Layer | None, sinks: None
) -> int:
    """The mask that attention remembers."""
    q, k, _ = _heads(run, qkv)
    return 0 if layer is None else _remembered_mask(run, q, k, k, layer, None)


def _finished_product(
    run: Run, x: Layout, weight: Layout, bias: Layout | None, scale: None, residual: Layout | None
) -> int:
    """The product, if it is cast; in C it is not made before."""
    rows = x.count // max(x.shape[-1], 1)
    if "dtype" not in run.attrs or (
        FEW_ROWS and torch.float32 in FEW_ROWS.results and 0 < rows <= FEW_ROWS.most
    ):
        return 0
    return rows * weight.shape[0] * x.item


def _gated_product(run: Run, x: Layout, weight: Layout, bias: Layout | None) -> int:
    """One of gate and up; of one row both; in C neither."""
    rows = x.count // max(x.shape[-1], 1)
    if FEW_ROWS and gated_few_rows(run) and 0 < rows <= FEW_ROWS.most:
        return 0
    half = x.count // x.shape[-1] * weight.shape[0] // 2 * x.item if x.count else 0
    return 2 * half if x.count == x.shape[-1] else half


def _moe_mlp_sorted(
    run: Run, x: Layout, gate_up: Layout, down: Layout, experts: Layout, weights: Layout
) -> int:
    """All shares in float32, the order of the slots, and what one expert takes, to which all tokens may go."""
    slots, hidden, size = experts.count, x.shape[-1], down.shape[-1]
    one_expert = slots * (x.item * (hidden + 2 * size + hidden) + (4 * hidden if x.is_half else 0))
    return slots * (4 * hidden + 3 * 8) + one_expert


def _dequantized_pieces(
    run: Run, x: Layout, weight: Layout, scales: Layout, zeros: Layout | None, outputs: int
) -> int:
    """The most of the moments in which a piece is unpacked, converted, made smaller by its zero points, multiplied; nothing in C."""
    columns, item = x.shape[-1], x.item
    rows = x.count // max(columns, 1)
    if _runs_in_c(run, x):
        return 0
    piece = min(quantized.step_of(columns), outputs)
    decoded, product = piece * columns, rows * piece
    if not run.kernel.startswith(("int4", "int8_groups")):
        return _scaled_pieces(run, x, decoded, product)
    unpacked = decoded if weight.dtype == "uint8" else 0
    subtracted = 0 if zeros is None else piece * scales.shape[-1]
    return max(2 * unpacked, unpacked + item * decoded, item * (decoded + max(subtracted, product)))


def _runs_in_c(run: Run, x: Layout) -> bool:
    """Whether the kernel in C takes these rows."""
    few = quantized.few_rows(run)
    return few is not None and x.dtype == "bfloat16" and 0 < x.count <= few.most * x.shape[-1]


def _scaled_pieces(run: Run, x: Layout, decoded: int, product: int) -> int:
    """The most of three moments: a piece is decoded, multiplied, its product scaled in float32. Beside it x in float32, if it is float16."""
    is_fp8 = run.kernel.startswith("fp8")
    if not is_fp8 and 0 < x.count <= quantized.INT8_ROWS * x.shape[-1]:
        return 0  # torch's kernel
    item, converted = {"float32": (4, 0), "float16": (4, 4), "bfloat16": (2, 8 if is_fp8 else 0)}[x.dtype]
    moved = 2 * decoded if is_fp8 and item == 4 else 0
    most = max(item * decoded + moved, item * (decoded + product), (item + converted) * product)
    return most + (4 * x.count if x.dtype == "float16" else 0)


def _quantized_product(
    run: Run,
    x: Layout,
    weight: Layout,
    scales: Layout,
    zeros: Layout | None,
    bias: Layout | None,
    scale: Layout | None,
    residual: Layout | None,
) -> int:
    """The pieces; the whole product, unless it is the result because nothing comes after it that takes new memory."""
    attrs, pieces = run.attrs, _dequantized_pieces(run, x, weight, scales, zeros, weight.shape[0])
    is_new = attrs.get("activation", "silu").startswith("gelu") or "scale" in attrs or "dtype" in attrs
    in_c = _runs_in_c(run, x) and quantized.only_adds(run)
    if scale is None and (in_c or (not is_new and residual is None)):
        return pieces
    count = x.count // max(x.shape[-1], 1) * weight.shape[0]
    product, result = count * x.item, count * dtypes.size_bytes(attrs.get("dtype", x.dtype))
    return max(pieces + product - result, product)


def _quantized_gated_product(
    run: Run, x: Layout, weight: Layout, scales: Layout, zeros: Layout | None, bias: Layout | None
) -> int:
    """The pieces and one of gate and up; of one row pieces of both; in C both."""
    outputs = weight.shape[0]
    half = x.count // max(x.shape[-1], 1) * (outputs // 2) * x.item
    if _runs_in_c(run, x) and activation_name(run) in GATES:
        return 2 * half
    if x.count != x.shape[-1]:
        return _dequantized_pieces(run, x, weight, scales, zeros, outputs // 2) + half
    pieces = _dequantized_pieces(run, x, weight, scales, zeros, outputs) + half
    return max(pieces, 2 * half) if _names_gelu(run) else pieces


def _names_gelu(run: Run) -> bool:
    """Whether an activation is not made in place."""
    return "approximate" in run.attrs or run.attrs["activation"].startswith("gelu")


def _sdpa_fused(run: Run, q: Layout, k: Layout, v: Layout, mask: Layout | None) -> int:
    """The causal mask, and what it makes of the given one."""
    if mask is None or not run.attrs.get("is_causal", False):
        return 0
    pairs = q.shape[1] * k.shape[1]
    return pairs + max(mask.count, pairs) * mask.item


WORKSPACES: Mapping[str, Workspace] = {
    "linear_plain": Workspace(_nothing),
    "linear_bfloat16": Workspace(_nothing),
    "linear_float32": Workspace(_nothing),
    "linear_wide": Workspace(_linear_wide),
    "finished_product": Workspace(_finished_product),
    "rms_norm_last": Workspace(_rms_norm_last),
    "rms_norm_of_sum": Workspace(_rms_norm_of_sum),
    "rope_tables": Workspace(_rope_tables),
    "rope_rotated": Workspace(_rope_rotated),
    "gated_product": Workspace(_gated_product),
    "moe_mlp_sorted": Workspace(_moe_mlp_sorted),
    **{f"{name}_product": Workspace(_quantized_product) for name in quantized.KINDS},
    **{f"{name}_gated_product": Workspace(_quantized_gated_product) for name in quantized.KINDS},
    "qkv_attention": Workspace(_qkv_attention, _remembered_by_qkv),
    "attention_cached": Workspace(_attention_cached, _remembered_mask),
    "attention_fused": Workspace(_attention_fused),
    "sdpa_fused": Workspace(_sdpa_fused),
}
"""For each kernel that is more than a reference what it holds."""

MEMORY = MemoryPolicy(WORKSPACES)
