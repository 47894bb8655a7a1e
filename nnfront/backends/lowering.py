# SPDX-License-Identifier: Apache-2.0
"""IR to a program with the kernels of a target."""

from __future__ import annotations

from nnfront.backends.select import select
from nnfront.backends.table import kernels_of
from nnfront.ir import IRModule
from nnfront.lower import Block, Program
from nnfront.lower.lower import lower as lower_module
from nnfront.lower.slots import Frame


def lower(ir: IRModule, target: str = "cpu") -> Program:
    """Return the program of every public function and every transform of `ir`, with the kernels of the target.

    Raises LowerError for what cannot run: a dim that nothing binds.
    """
    return lower_module(ir, target, choose)


def choose(block: Block, frame: Frame, target: str) -> Block:
    """Return the block with the kernels of a target."""
    return select(block, frame, kernels_of(target), target)
