# SPDX-License-Identifier: Apache-2.0
"""Configs that a version of Triton compiles to code that spills registers: `choose` leaves them out there, another tile takes over.

Where no other tile can take over, the budgets of that version say how much spills (`spills` in its file): outside of loops only. What attention spills
with 3.6 is addresses of keys that are on their way some steps ahead; pages that are asked for ahead have no part in it (contiguous caches spill as
much, and heads of 256 spill 2 instead of 3 without them).

Found by compiling every config with every version, without a GPU (tests/kernels/kernel_budgets.py). A row holds for one
version. 3.7 and 3.8 spill none of these, and have not been tried with all.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from nnfront_kernels.common import ARCHS, Config

TRITON = ".".join(triton.__version__.split(".")[:2])


@dataclass(frozen=True)
class Spill:
    """The tile with so many rows, for some group along K (None: for any), with zero points or without (None: either)."""

    kernel: str
    arch: str
    block_m: int
    group: int | None = None
    zero_points: bool | None = None


SPILLED: dict[str, tuple[Spill, ...]] = {
    "3.9": (
        Spill("matmul_int4", "sm_90", 128, group=64, zero_points=True),
        Spill("matmul_int8", "sm_100", 32, group=32),
    ),
    "3.6": (
        Spill("matmul_int4", "sm_100", 64, group=32, zero_points=False),
        Spill("matmul_int4", "sm_100", 128, group=64, zero_points=False),
        Spill("matmul_int8", "sm_80", 16, group=64),
        Spill("matmul_int8", "sm_100", 128, group=64),
    ),
}


def without_spills(
    kernel: str,
    configs: tuple[Config, ...],
    arch: str,
    *,
    group: int = 0,
    zero_points: bool = False,
    version: str = TRITON,
) -> tuple[Config, ...]:
    """The configs that the version of Triton compiles without spills for an arch or its family, in their order."""
    rows = {
        spill.block_m
        for spill in SPILLED.get(version, ())
        if (spill.kernel, spill.arch) == (kernel, ARCHS[arch].family)
        and spill.group in (None, group)
        and spill.zero_points in (None, zero_points)
    }
    return tuple(config for config in configs if config.block_m not in rows)
