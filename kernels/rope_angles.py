# SPDX-License-Identifier: Apache-2.0
"""Cosines and sines of the next tokens' angles: angle = (lengths[b] + t) * inv_freq[p], for all layers of a step in one launch.

Shapes: lengths [batch] int32, how many tokens each sequence has; inv_freq [pairs] float32; cos, sin [batch, seq, pairs] float32,
each times `factor`. Positions are exact in float32 up to 2^24, the product is rounded once.

Quarter turns are taken off in float64, and what is left goes into polynomials for up to pi / 4 (Cephes' `sinf.c`, Moshier): the library's functions
would keep a table for angles of any size, in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.cache import require_counts
from nnfront_kernels.common import WARP, Config, Kernel, Plan, empties, launcher, require_vector
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.tiles import cdiv

DTYPES = ("float32",)


@dataclass(frozen=True)
class AnglesShape:
    batch: int
    seq: int
    pairs: int


def reference(
    lengths: torch.Tensor,
    inv_freq: torch.Tensor,
    seq: int,
    *,
    factor: float = 1.0,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: the angles in float32, all else in `compute`."""
    positions = lengths[:, None] + torch.arange(seq, device=lengths.device)
    angles = (positions.float()[..., None] * inv_freq).to(compute)
    return angles.cos() * factor, angles.sin() * factor


# One block for a token: a thread for two pairs of a head of 128. Not yet measured.
CONFIGS = (Config(1, 4 * WARP, 1, 1, 1),)


def choose(shape: AnglesShape, dtype: str, arch: str) -> Config:
    """The one config, no wider than the pairs."""
    (config,) = CONFIGS
    return replace(config, block_n=min(config.block_n, triton.next_power_of_2(max(shape.pairs, WARP))))


@triton.jit(do_not_specialize=["SEQ"])
def rope_angles_kernel(
    lengths_ptr,
    inv_freq_ptr,
    cos_ptr,
    sin_ptr,
    SEQ,
    PAIRS,
    factor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inv_freq = tl.load(inv_freq_ptr + pair, mask=pair < PAIRS, other=0.0)
    position = tl.load(lengths_ptr + token // SEQ) + (token % SEQ).to(tl.int32)
    angle = position.to(tl.float32) * inv_freq
    cos, sin = cos_and_sin(angle)
    at = token * PAIRS + pair
    tl.store(cos_ptr + at, cos * factor, mask=pair < PAIRS)
    tl.store(sin_ptr + at, sin * factor, mask=pair < PAIRS)


@triton.jit
def cos_and_sin(angle):
    """Both of a float32 angle below 2^31 quarter turns, to 2^-22."""
    wide = angle.to(tl.float64)
    turns = tl.floor(wide * 0.6366197723675814 + 0.5)
    x = (wide - turns * 1.5707963267948966).to(tl.float32)
    quarter = turns.to(tl.int32) & 3
    z = x * x
    sin = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    cos = (
        ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    )
    odd, negative = (quarter & 1) == 1, (quarter & 2) == 2
    turned_cos, turned_sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where(odd != negative, -turned_cos, turned_cos), tl.where(negative, -turned_sin, turned_sin)


def plan(
    lengths: torch.Tensor,
    inv_freq: torch.Tensor,
    seq: int,
    *,
    factor: float = 1.0,
    arch: str | None = None,
    config: Config | None = None,
) -> Plan:
    """Compute cos and sin [batch, seq, pairs]. Option: factor, what both are multiplied by."""
    batch, pairs = lengths.shape[0], inv_freq.shape[0]
    require_counts("lengths", lengths, batch)
    require_vector("inv_freq", inv_freq, pairs)
    arch, config = KERNEL.settle(AnglesShape(batch, seq, pairs), inv_freq, arch, config)
    cos, sin = (torch.empty(batch, seq, pairs, dtype=torch.float32, device=lengths.device) for _ in range(2))
    return Plan(
        kernel=rope_angles_kernel,
        grid=(batch * seq, cdiv(pairs, config.block_n)),
        arguments={
            "lengths_ptr": lengths,
            "inv_freq_ptr": inv_freq,
            "cos_ptr": cos,
            "sin_ptr": sin,
            "SEQ": seq,
            "PAIRS": pairs,
            "factor": float(factor),
        },
        constants={"BLOCK": config.block_n, "PDL": overlaps(arch)},
        config=config,
        output=cos,
        also=("sin_ptr",),
    )


def example(shape: AnglesShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    make = empties(dtype, device)
    return (make(shape.batch, kind="int32"), make(shape.pairs), shape.seq), {}


launch = launcher(plan)
KERNEL = Kernel.of(globals(), typical=AnglesShape(32, 1, 64))
