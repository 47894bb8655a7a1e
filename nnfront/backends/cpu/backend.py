# SPDX-License-Identifier: Apache-2.0
"""The back end of a CPU: torch's best op for the case, and kernels in C that run in a row as one call."""

from __future__ import annotations

from collections.abc import Sequence

from nnfront.backends.backend import Backend, Pair
from nnfront.backends.cpu import kernels, rules, tape
from nnfront.backends.cpu.workspace import MEMORY
from nnfront.lower import Slot
from nnfront.memory.allocations import MemoryPolicy
from nnfront.passes import PIPELINES


class CpuBackend(Backend):
    """Tensors in the host's memory, weights mapped from files where they can be."""

    name = "cpu"
    passes = PIPELINES["cpu"]
    kernels = kernels.KERNELS
    rules = rules.CPU

    def memory(self, target: str) -> MemoryPolicy:
        return MEMORY

    def join(self, pairs: Sequence[Pair], slots: Sequence[Slot], method: str) -> list[Pair]:
        return tape.join(pairs, slots, method)


CPU = CpuBackend()
