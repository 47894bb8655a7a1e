# SPDX-License-Identifier: Apache-2.0
"""Launches that begin before the one before them on their stream has ended (programmatic dependent launch; Hopper and later).

A kernel that takes part says when the next may start (`let_next_start`): blocks of the next begin where an SM has room as soon as all blocks of this one have said
so, or ended. Nothing that another launch wrote may be read, and nothing that it may still read be written, before `wait_for_earlier`, which returns when
all earlier launches have ended and their stores are seen. Every block of such a kernel waits, even one that does nothing else: the next counts on it.
Weights that no launch writes can be fetched into L2 before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from nnfront_kernels.common import ARCHS, Config
from nnfront_kernels.tiles import cdiv
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = 128  # bytes that one instruction fetches


def overlaps(arch: str) -> bool:
    """Whether launches on an arch overlap: not on those without the instructions, nor where kernels are interpreted."""
    return ARCHS[arch].target >= 90 and not triton.knobs.runtime.interpret


def lines_ahead(config: Config, bits: int, arch: str) -> int:
    """How many lines of each row of its weight a block fetches before it waits: a power of two that holds what the first steps of K read of elements of so many bits."""
    if not (bits and overlaps(arch)):
        return 0
    steps = max(config.num_stages - 1, 1) * config.block_k * bits // 8
    return triton.next_power_of_2(cdiv(steps, LINE))


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def fetch_rows(w_ptr, rows, stride, N, first, size, LINES: tl.constexpr):
    """Ask for LINES lines of each row of w [N, ...] from byte `first` of `size` on; rows and lines beyond are those at the edge."""
    if LINES:
        row = w_ptr + tl.minimum(rows, N - 1).to(tl.int64) * stride
        byte = tl.minimum(first + tl.arange(0, LINES) * 128, size - 1)
        place = row.to(tl.int64)[:, None] + byte[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
        )
