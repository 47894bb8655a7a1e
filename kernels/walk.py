# SPDX-License-Identifier: Apache-2.0
"""In which order the blocks of a matmul walk over its tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(index, num_m, num_n, GROUP_M: tl.constexpr):
    """The row and column of the index-th of num_m x num_n tiles.

    Blocks that run together cover GROUP_M tile rows, so that they share tiles of the weight in L2.
    """
    first_row = index // (GROUP_M * num_n) * GROUP_M
    rows = tl.minimum(num_m - first_row, GROUP_M)
    within = index % (GROUP_M * num_n)
    return first_row + within % rows, within // rows
