# SPDX-License-Identifier: Apache-2.0
"""An activation of one tensor times another: the middle of a gated feed-forward layer, where no product has it in registers.

    y[r, i] = act(gate[r, i]) * up[r, i]          act: silu, gelu (with erf) or gelu_tanh

Shapes: gate, up and y [rows, size], adjacent along size, any strides between rows: gate and up may be the left and the right
half of one tensor. In float32, rounded once. y may be gate or up.

Source: Shazeer, arXiv 2002.05202, eq. 5 and 6; Hendrycks and Gimpel, arXiv 1606.08415, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import (
    Config,
    Kernel,
    KernelError,
    Plan,
    launcher,
    require_matrix,
    rows_refusal,
    taking,
)
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.epilogue import activate, activated
from nnfront_kernels.remembered import remembered
from nnfront_kernels.tiles import cdiv

DTYPES = ("float16", "bfloat16", "float32")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class GatedShape:
    """`rows` rows of `size` results."""

    rows: int
    size: int


def reference(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str = "silu",
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`."""
    return (activated(gate.to(compute), activation) * up.to(compute)).to(gate.dtype)


# Rows x columns of a block. By arithmetic: 16 bytes or more in flight for each thread; not yet measured.
CONFIGS = (Config(1, 2048, 1, 4, 1), Config(8, 256, 1, 4, 1))


def choose(shape: GatedShape, dtype: str, arch: str) -> Config:
    """Rows as wide as a block one at a time, narrower ones several at once."""
    return CONFIGS[0] if shape.size > 1024 else CONFIGS[1]


@triton.jit(do_not_specialize=["ROWS"])
def gated_activation_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    ROWS,
    SIZE,
    stride_gm,
    stride_um,
    stride_ym,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    # Rows along the grid's first axis, which alone may have more than 65535 blocks.
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (row < ROWS)[:, None] & (at < SIZE)
    row = row.to(tl.int64)[:, None]
    gate = tl.load(gate_ptr + row * stride_gm + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_um + at, mask=inside, other=0.0).to(tl.float32)
    y = activate(gate, ACTIVATION) * up
    tl.store(y_ptr + row * stride_ym + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@taking(DTYPES)
def accepts(shape: GatedShape, dtype: str, arch: str) -> str | None:
    return rows_refusal(shape.rows)


@remembered
def plan(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str = "silu",
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """act(gate) * up for gate and up [rows, size]: [rows, size].

    Options: activation, "silu" by default; out, to write to.
    """
    if activation not in ACTIVATIONS:
        raise KernelError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    require_matrix("gate", gate, None, gate.shape[-1], None)
    require_matrix("up", up, *gate.shape, gate.dtype)
    shape = GatedShape(*gate.shape)
    arch, config = KERNEL.settle(shape, gate, arch, config)
    if out is None:
        out = torch.empty(shape.rows, shape.size, dtype=gate.dtype, device=gate.device)
    require_matrix("out", out, shape.rows, shape.size, gate.dtype)
    return Plan(
        kernel=gated_activation_kernel,
        grid=(cdiv(shape.rows, config.block_m), cdiv(shape.size, config.block_n)),
        arguments={
            "gate_ptr": gate,
            "up_ptr": up,
            "y_ptr": out,
            "ROWS": shape.rows,
            "SIZE": shape.size,
            "stride_gm": gate.stride(0),
            "stride_um": up.stride(0),
            "stride_ym": out.stride(0),
        },
        constants={
            "ACTIVATION": activation,
            **config.blocks("mn"),
            "PDL": overlaps(arch),
        },
        config=config,
        output=out,
    )


def example(shape: GatedShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    size, kind = (shape.rows, shape.size), getattr(torch, dtype)
    return tuple(torch.empty(size, dtype=kind, device=device) for _ in range(2)), {}


launch = launcher(plan)
KERNEL = Kernel.of(globals(), typical=GatedShape(4096, 14336))
