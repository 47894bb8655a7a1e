# SPDX-License-Identifier: Apache-2.0
"""The kernels of the CPU that are more than an op's reference. Each maker gets the instruction and returns the function to run.

What a kernel computes is what the reference of its op computes, up to the order of sums. `nnfront.backends.cpu.rules` says when each is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from nnfront.backends.cpu import attention
from nnfront.backends.cpu import decode_attention as one_token
from nnfront.backends.cpu import norm as norms
from nnfront.backends.cpu import quantized_linear as quantized
from nnfront.backends.cpu.activations import ACTIVATIONS, activation, activation_name
from nnfront.backends.cpu.gemv import FEW_ROWS
from nnfront.lower import PACK, Run
from nnfront.state.layer import CacheLayer

# Elements of a weight that are widened at a time: 4 MiB of float32.
PIECE = 1 << 20


def _tuple(run: Run) -> Callable[..., Any]:
    return lambda *values: values


def _linear(run: Run) -> Callable[..., Any]:
    return F.linear


def _linear_bfloat16(run: Run) -> Callable[..., Any]:
    """Few rows go to a kernel for them; more rows to oneDNN, which is the faster one then."""
    if FEW_ROWS is None:
        return F.linear
    takes, multiply = FEW_ROWS.takes, FEW_ROWS.multiply

    def linear_bfloat16(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(x, weight, bias) if takes(x, weight, bias) else F.linear(x, weight, bias)

    return linear_bfloat16


def _linear_float32(run: Run) -> Callable[..., Any]:
    """oneDNN's inner product; the BLAS that `F.linear` calls is tuned for other processors.

    2048 x 3072, one thread: 1 row 1.3 ms against 1.5, 4 rows 2.1 against 2.9, 16 rows 3.7 against 11, 256 rows 116 against 179.
    """
    try:
        pointwise = torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return F.linear

    def linear_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not weight.is_contiguous() or not x.numel():
            return F.linear(x, weight, bias)
        y: torch.Tensor = pointwise(x, weight, bias, "none", [], "")
        return y

    return linear_float32


def _linear_wide(run: Run) -> Callable[..., Any]:
    """A float32 result from half operands: the weight is widened in pieces that stay in the caches, never as a whole.

    Few rows of bfloat16 go to a kernel that widens in registers, if there is one.
    """
    few = FEW_ROWS if FEW_ROWS and torch.float32 in FEW_ROWS.results else None

    def linear_wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if few and x.dtype == weight.dtype == torch.bfloat16 and few.takes(x, weight, None):
            y = few.multiply(x, weight, None, None, torch.float32)
            return y if bias is None else y.add_(bias)
        rows, columns = weight.shape
        y = torch.empty((*x.shape[:-1], rows))
        wide, step = x.float(), max(PIECE // max(columns, 1), 1)
        for first in range(0, rows, step):
            part = weight.narrow(0, first, min(step, rows - first))
            y.narrow(-1, first, part.shape[0]).copy_(F.linear(wide, part.float()))
        return y if bias is None else y.add_(bias)

    return linear_wide


def _rope_tables(run: Run) -> Callable[..., Any]:
    """Cosines of both features of each pair, and sines with the sign of each: what `rope_rotated` multiplies by.

    Shapes: cos and sin [..., seq, pairs], both results [..., seq, 1, 2 * pairs].
    """
    dtype: torch.dtype = getattr(torch, run.attrs["dtype"])

    def rope_tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.to(dtype), sin.to(dtype)
        return torch.cat([cos, cos], -1).unsqueeze(-2), torch.cat([-sin, sin], -1).unsqueeze(-2)

    return rope_tables


def _rope_rotated(run: Run) -> Callable[..., Any]:
    """x * cos + (x with its halves swapped) * sin, in three calls of torch instead of sixteen.

    One row of 32 heads of 64: 5 us against 20; 512 rows: 0.34 ms (one thread). Few rows of bfloat16 in C.
    """

    def rope_rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if (in_c := one_token.rotate(x, cos, sin)) is not None:
            return in_c
        size = cos.shape[-1]
        rest = x.shape[-1] - size
        rotated = x.narrow(-1, 0, size) if rest else x
        if x.dtype != cos.dtype:
            rotated = rotated.to(cos.dtype)
        y = torch.roll(rotated, size // 2, -1).mul_(sin).addcmul_(rotated, cos)
        if x.dtype != cos.dtype:
            y = y.to(x.dtype)
        return torch.cat([y, x.narrow(-1, size, rest)], -1) if rest else y

    return rope_rotated


def _finished_product(run: Run) -> Callable[..., Any]:
    """x @ weight.T + bias + residual, as float32 if it is cast: few rows are rounded once at the end, more rows after each."""
    dtype: torch.dtype = getattr(torch, run.attrs.get("dtype", "bfloat16"))
    few = FEW_ROWS if FEW_ROWS and dtype in FEW_ROWS.results else None

    def finished_product(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        if few and few.takes(x, weight, bias) and (residual is None or residual.is_contiguous()):
            return few.multiply(x, weight, bias, residual, dtype)
        y = F.linear(x, weight, bias)
        return (y if residual is None else y.add_(residual)).to(dtype)

    return finished_product


def gated_few_rows(run: Run) -> Callable[..., torch.Tensor] | None:
    """Return the kernel that computes a gated product of few rows, if there is one."""
    if FEW_ROWS is None or run.attrs["product"] != "linear_bfloat16":
        return None
    return FEW_ROWS.gated.get(activation_name(run))


def _gated_product(run: Run) -> Callable[..., Any]:
    """activation(x @ gate.T) * (x @ up.T), gate and up the halves of one weight.

    Few rows go to a kernel that does all of it, if there is one. Else rows are multiplied with one half after the other: elementwise calls on
    halves of one result take 1.4 times as long.
    """
    multiply, activate = KERNELS[run.attrs["product"]](run), activation(run)
    few, gated = FEW_ROWS, gated_few_rows(run)

    def gated_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if few and gated and few.takes(x, weight, bias):
            return gated(x, weight, bias)
        half = weight.shape[0] // 2
        if x.numel() == x.shape[-1]:
            both = multiply(x, weight, bias)
            return activate(both.narrow(-1, 0, half)).mul_(both.narrow(-1, half, half))
        gate_bias, up_bias = (None, None) if bias is None else (bias[:half], bias[half:])
        return activate(multiply(x, weight[:half], gate_bias)).mul_(multiply(x, weight[half:], up_bias))

    return gated_product


def _qkv_attention(run: Run) -> Callable[..., Any]:
    """Rotate q and k, which lie next to each other, at once; append k and v to the cache, if there is one; attend.

    Shapes: qkv [batch, seq, (heads + 2 * groups) * size], y [batch, seq, heads, size].
    """
    rotate, with_cache, without = _rope_rotated(run), attention.cached(run), attention.fused(run)
    heads, groups = run.attrs["heads"], run.attrs["groups"]
    window, scale = run.attrs.get("window"), run.attrs.get("scale")

    def qkv_attention(
        qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: CacheLayer | None, sinks: None
    ) -> Any:
        if layer is not None and qkv.shape[1] == 1:
            y = one_token.attend_rotated(qkv, cos, sin, heads, groups, layer, window, scale)
            if y is not None:
                return y, layer
        parts = qkv.view(*qkv.shape[:2], heads + 2 * groups, -1)
        q, k = rotate(parts.narrow(2, 0, heads + groups), cos, sin).split((heads, groups), 2)
        v = parts.narrow(2, heads + groups, groups)
        attend = without if layer is None else with_cache
        return attend(q, k, v, layer, None)

    return qkv_attention


def _within(run: Run) -> Callable[..., Any]:
    """The question of a special case as one Python expression: 0.2 us for a dim, where the reference takes 1.2."""
    names = [f"v{i}" for i in range(len(run.inputs))]
    asked = []
    for name, (low, high, step) in zip(names, run.attrs["ranges"], strict=True):
        if low is not None and low == high:
            asked.append(f"{name} == {low!r}")
        else:
            asked += [f"{name} >= {low!r}"] if low is not None else []
            asked += [f"{name} <= {high!r}"] if high is not None else []
        asked += [f"{name} % {step!r} == 0"] if step is not None else []
    numbers = "".join(f"    if {name}.__class__ is Tensor: {name} = {name}.item()\n" for name in names)
    scope: dict[str, Any] = {"Tensor": torch.Tensor, "inf": float("inf"), "nan": float("nan")}
    exec(f"def within({', '.join(names)}):\n{numbers}    return {' and '.join(asked) or 'True'}", scope)
    within: Callable[..., Any] = scope["within"]
    return within


def _moe_mlp_sorted(run: Run) -> Callable[..., Any]:
    """One product for each expert that was chosen, over the tokens that chose it; shares are added in the order of the choices."""
    activate, of_bfloat16 = ACTIVATIONS[run.attrs.get("activation", "silu")], _linear_bfloat16(run)

    def moe_mlp_sorted(
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        tokens, top_k = experts.shape
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        linear = of_bfloat16 if x.dtype == torch.bfloat16 else F.linear
        shares = x.new_zeros(tokens * top_k, x.shape[1], dtype=wide)
        chosen, order = experts.reshape(-1).sort(stable=True)
        first = 0
        for expert, count in enumerate(torch.bincount(chosen.clamp(-1, len(gate_up)) + 1).tolist(), -1):
            slots, first = order[first : first + count], first + count
            if count and 0 <= expert < len(gate_up):
                gate, up = linear(x[slots // top_k], gate_up[expert], None).chunk(2, -1)
                shares[slots] = linear(activate(gate).mul_(up), down[expert], None).to(wide)
        return shares.view(tokens, top_k, x.shape[1]).mul_(weights.to(wide).unsqueeze(-1)).sum(1).to(x.dtype)

    return moe_mlp_sorted


KERNELS: dict[str, Callable[[Run], Callable[..., Any]]] = {
    PACK: _tuple,
    "linear_plain": _linear,
    "linear_bfloat16": _linear_bfloat16,
    "linear_float32": _linear_float32,
    "linear_wide": _linear_wide,
    "rms_norm_last": norms.rms_norm_last,
    "rms_norm_of_sum": norms.rms_norm_of_sum,
    "rope_tables": _rope_tables,
    "rope_rotated": _rope_rotated,
    "gated_product": _gated_product,
    "finished_product": _finished_product,
    "moe_mlp_sorted": _moe_mlp_sorted,
    "int8_product": quantized.product(quantized.int8),
    "int8_gated_product": quantized.gated_product(quantized.int8),
    "int8_groups_product": quantized.product(quantized.grouped),
    "int8_groups_gated_product": quantized.gated_product(quantized.grouped),
    "int4_product": quantized.product(quantized.grouped),
    "int4_gated_product": quantized.gated_product(quantized.grouped),
    "fp8_product": quantized.product(quantized.fp8),
    "fp8_gated_product": quantized.gated_product(quantized.fp8),
    "qkv_attention": _qkv_attention,
    "within": _within,
    "attention_cached": attention.cached,
    "attention_fused": attention.fused,
    "sdpa_fused": attention.sdpa,
}
