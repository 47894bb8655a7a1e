# SPDX-License-Identifier: Apache-2.0
"""y[t] = sum over j of weights[t, j] * x[t * top_k + j]: the shares of a token's experts, added up in order.

Shapes: x [T * top_k, H] 16-bit or float32, as `grouped_matmul` scatters it; weights [T, top_k] of any float dtype; experts
[T, top_k] int32; y [T, H] like x. Choices outside of 0 <= expert < num_experts add nothing, and their rows of x are not
read. Sums are float32, from j = 0 upwards: repeatable bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import WARP, Config, Kernel, Plan, empties, launcher, require_matrix
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.tiles import cdiv

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class CombineShape:
    tokens: int
    top_k: int
    width: int


def reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The definition, in float32 or in `compute`."""
    used = ((experts >= 0) & (experts < num_experts))[..., None]
    shares = x.to(compute).unflatten(0, tuple(experts.shape)) * weights.to(compute)[..., None]
    return torch.where(used, shares, torch.zeros((), dtype=compute)).sum(1).to(x.dtype)


# 16 bytes for each thread; not yet measured.
CONFIGS = (Config(1, 32 * WARP, 1, 4, 1),)


@triton.jit
def moe_combine_kernel(
    x_ptr,
    weights_ptr,
    experts_ptr,
    y_ptr,
    H,
    stride_xm,
    stride_wm,
    stride_em,
    stride_ym,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + token * stride_em + j)
        used = (expert >= 0) & (expert < E)
        weight = tl.load(weights_ptr + token * stride_wm + j).to(tl.float32)
        x = tl.load(x_ptr + (token * TOP_K + j) * stride_xm + at, mask=at < tl.where(used, H, 0), other=0.0)
        total += tl.where(used, weight, 0.0) * x.to(tl.float32)
    tl.store(y_ptr + token * stride_ym + at, total.to(y_ptr.dtype.element_ty), mask=at < H)


def plan(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    *,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Compute y [T, H]. Option: out."""
    require_matrix("experts", experts, None, experts.shape[-1], torch.int32)
    tokens, top_k = experts.shape
    require_matrix("x", x, tokens * top_k, x.shape[-1], None)
    require_matrix("weights", weights, tokens, top_k, None)
    width = x.shape[1]
    arch, config = KERNEL.settle(CombineShape(tokens, top_k, width), x, arch, config)
    if out is None:
        out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    require_matrix("out", out, tokens, width, x.dtype)
    return Plan(
        kernel=moe_combine_kernel,
        grid=(tokens, cdiv(width, config.block_n)),
        arguments={
            "x_ptr": x,
            "weights_ptr": weights,
            "experts_ptr": experts,
            "y_ptr": out,
            "H": width,
            "stride_xm": x.stride(0),
            "stride_wm": weights.stride(0),
            "stride_em": experts.stride(0),
            "stride_ym": out.stride(0),
        },
        constants={"TOP_K": top_k, "E": num_experts, "BLOCK": config.block_n, "PDL": overlaps(arch)},
        config=config,
        output=out,
    )


def example(shape: CombineShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make, rows = empties(dtype, device), (shape.tokens, shape.top_k)
    x = make(shape.tokens * shape.top_k, shape.width)
    return (x, make(*rows, kind="float32"), make(*rows, kind="int32"), 128), {}


launch = launcher(plan)
KERNEL = Kernel.of(globals(), typical=CombineShape(4096, 8, 2048))
