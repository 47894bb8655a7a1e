# SPDX-License-Identifier: Apache-2.0
"""GPU kernels in Triton. `KERNELS` lists the record of each; a kernel file stands alone and its docstring says what it does.

common.py     the records (Kernel, Config, Cost, Plan), limits of the GPUs, checks
tiles.py      how a tile is chosen;  epilogue.py  what happens to a finished tile
inspect.py    compile for a GPU that is not there and read the machine code
matmul*.py    one kernel each
"""

from __future__ import annotations

from nnfront_kernels import matmul, matmul_tma
from nnfront_kernels.common import ARCHS, Config, Cost, Kernel, KernelError, Plan

KERNELS: tuple[Kernel, ...] = (matmul.KERNEL, matmul_tma.KERNEL)

__all__ = ["ARCHS", "KERNELS", "Config", "Cost", "Kernel", "KernelError", "Plan"]
