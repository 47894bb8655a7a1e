# SPDX-License-Identifier: Apache-2.0
"""What the matmul kernels do to a finished float32 tile before they write it.

    z = scale * (x @ w.T) + bias
    a = act(z)                                   or, gated:  act(z[:, 0::2]) * z[:, 1::2]    (`Gate` has more)
    y = cast(a + residual)

A gated pair keeps its two weights interleaved row by row (`interleave`), so a gate and its partner are neighbours in
the tile and in a thread's registers: the product needs no second pass and fits every tile size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import KernelError, require_matrix, require_vector

ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu", "relu2")
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Epilogue:
    """The arguments of `launch` that follow the weights. bias [N], residual [M, columns], columns N or N // 2."""

    bias: torch.Tensor | None = None
    activation: str = "none"
    gated: bool = False
    residual: torch.Tensor | None = None
    scale: float = 1.0
    out_dtype: torch.dtype | None = None

    def columns(self, n: int) -> int:
        return n // 2 if self.gated else n

    def check(self, m: int, n: int) -> None:
        """Raise KernelError if an argument does not fit a tile grid of [m, n]."""
        if self.activation not in ACTIVATIONS:
            raise KernelError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if self.gated and n % 2:
            raise KernelError(f"a gated weight interleaves two matrices, got an odd number of rows: {n}")
        if self.out_dtype not in (None, *OUT_DTYPES):
            raise KernelError(f"out_dtype must be float16, bfloat16 or float32, got {self.out_dtype}")
        if self.bias is not None:
            require_vector("bias", self.bias, n)
        if self.residual is not None:
            require_matrix("residual", self.residual, m, self.columns(n), None)

    def output(self, out: torch.Tensor | None, x: torch.Tensor, n: int) -> torch.Tensor:
        """`out` after a check of its shape, or a new tensor. Like x in device, and in dtype unless out_dtype says."""
        columns = self.columns(n)
        if out is None:
            return torch.empty(x.shape[0], columns, dtype=self.out_dtype or x.dtype, device=x.device)
        require_matrix("out", out, x.shape[0], columns, self.out_dtype or x.dtype)
        return out

    def arguments(self, y: torch.Tensor) -> dict[str, Any]:
        """The run-time arguments that `write_tile` reads, but for M and N."""
        return {
            "y_ptr": y,
            "bias_ptr": self.bias,
            "residual_ptr": self.residual,
            "scale": self.scale,
            "stride_ym": y.stride(0),
            "stride_rm": 0 if self.residual is None else self.residual.stride(0),
        }

    def constants(self) -> dict[str, Any]:
        """The constexpr arguments that `finish_tile` reads, but for the tile's sizes."""
        return {"ACTIVATION": self.activation, "GATED": self.gated}

    def reference(self, product: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """The formula above on a product [M, N] of float32 or wider, in the product's own precision."""
        z = product * self.scale
        if self.bias is not None:
            z = z + self.bias.to(z.dtype)
        a = self.gate(z[:, 0::2], z[:, 1::2]) if self.gated else activated(z, self.activation)
        if self.residual is not None:
            a = a + self.residual.to(a.dtype)
        return a.to(self.out_dtype or out_dtype)

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The product of a gated pair."""
        return activated(gate, self.activation) * up


@dataclass(frozen=True)
class Gate(Epilogue):
    """Of gated pairs: gate is at most `limit`, up between -limit and limit, silu(gate) is gate * sigmoid(alpha * gate), and `up_offset` is added to up."""

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def constants(self) -> dict[str, Any]:
        more = {"ALPHA": self.alpha, "LIMIT": self.limit or 0.0, "OFFSET": self.up_offset}
        return {**super().constants(), **more}

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.activation == "silu":
            return gate * torch.sigmoid(self.alpha * gate) * (up + self.up_offset)
        return super().gate(gate, up + self.up_offset)


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[N, ...] and [N, ...] to [2 N, ...]: row 2 i is gate's row i, row 2 i + 1 is up's."""
    return torch.stack([gate, up], dim=1).flatten(0, 1)


def activated(z: torch.Tensor, activation: str) -> torch.Tensor:
    """The definition of an activation."""
    if activation == "silu":
        return torch.nn.functional.silu(z)
    if activation in ("gelu", "gelu_tanh"):
        return torch.nn.functional.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation in ("relu", "relu2"):
        return torch.relu(z) ** (1 + (activation == "relu2"))
    return z


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr = 1.0):
    if ACTIVATION == "silu":
        z = z * tl.sigmoid(z if ALPHA == 1.0 else ALPHA * z)
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))  # 1 / sqrt(2)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) * (z + 0.044715 z^3)
        z = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "relu":
        z = tl.where(z < 0.0, 0.0, z)
    elif ACTIVATION == "relu2":
        z = tl.where(z < 0.0, 0.0, z * z)
    return z


@triton.jit
def finish_tile(
    acc,  # [BLOCK_M, BLOCK_N] float32
    bias_ptr,
    scale,
    first_n,  # the tile's first column
    N,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALPHA: tl.constexpr = 1.0,
    LIMIT: tl.constexpr = 0.0,  # 0 is none
    OFFSET: tl.constexpr = 0.0,
):
    """Scale, bias and activation; the result has BLOCK_N // 2 columns if GATED."""
    acc = acc * scale
    if bias_ptr is not None:
        offs_n = first_n + tl.arange(0, BLOCK_N)
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        if LIMIT > 0.0:
            gate = tl.where(gate > LIMIT, LIMIT, gate)  # what is NaN stays so
            up = tl.where(tl.abs(up) > LIMIT, tl.where(up > 0.0, LIMIT, -LIMIT), up)
        acc = activate(gate, ACTIVATION, ALPHA) * (up if OFFSET == 0.0 else up + OFFSET)
    else:
        acc = activate(acc, ACTIVATION)
    return acc


@triton.jit
def halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def write_tile(
    acc,  # [BLOCK_M, BLOCK_N] float32
    y_ptr,
    bias_ptr,
    residual_ptr,
    scale,
    first_m,
    first_n,
    M,
    N,
    stride_ym,
    stride_rm,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The whole epilogue of a tile: half of its columns at a time, which leaves registers for the residual."""
    HALF: tl.constexpr = BLOCK_N // 2
    if GATED:
        half = finish_tile(acc, bias_ptr, scale, first_n, N, ACTIVATION, True, BLOCK_M, BLOCK_N)
        store_tile(
            half, y_ptr, residual_ptr, stride_ym, stride_rm, first_m, first_n // 2, M, N // 2, BLOCK_M, HALF
        )
    else:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        left = finish_tile(left, bias_ptr, scale, first_n, N, ACTIVATION, False, BLOCK_M, HALF)
        store_tile(left, y_ptr, residual_ptr, stride_ym, stride_rm, first_m, first_n, M, N, BLOCK_M, HALF)
        right = finish_tile(right, bias_ptr, scale, first_n + HALF, N, ACTIVATION, False, BLOCK_M, HALF)
        store_tile(
            right, y_ptr, residual_ptr, stride_ym, stride_rm, first_m, first_n + HALF, M, N, BLOCK_M, HALF
        )


@triton.jit
def store_tile(
    tile,  # [BLOCK_M, COLUMNS] float32
    y_ptr,
    residual_ptr,
    stride_ym,
    stride_rm,
    first_m,
    first_column,
    M,
    num_columns,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the residual, cast and write what lies inside [M, num_columns]."""
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_c = first_column + tl.arange(0, COLUMNS)
    inside = (offs_m < M)[:, None] & (offs_c < num_columns)[None, :]
    if residual_ptr is not None:
        rows = residual_ptr + offs_m.to(tl.int64) * stride_rm
        tile += tl.load(rows[:, None] + offs_c[None, :], mask=inside, other=0.0).to(tl.float32)
    rows = y_ptr + offs_m.to(tl.int64) * stride_ym
    tl.store(rows[:, None] + offs_c[None, :], tile.to(y_ptr.dtype.element_ty), mask=inside)
