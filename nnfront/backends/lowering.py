# SPDX-License-Identifier: Apache-2.0
"""IR to a program with the kernels of a target."""

from __future__ import annotations

from collections.abc import Collection

from nnfront.backends.registry import backend_of
from nnfront.backends.select import select
from nnfront.backends.table import kernels_of
from nnfront.errors import LowerError
from nnfront.ir import OPS, Function, FunctionBuilder, FunctionCall, IRModule
from nnfront.lower import Block, Program, Run, lower_function
from nnfront.lower.lower import lower as lower_module
from nnfront.lower.slots import Frame


def lower(ir: IRModule, target: str = "cpu") -> Program:
    """Return the program of every public function and every transform of `ir`, with the kernels of the target.

    Raises LowerError for what cannot run: a dim that nothing binds; and for an external function by the name of what has kernels of ours.
    """
    backend = backend_of(target)
    taken = OPS.keys() | {kernel.op for kernel in backend.kernels}
    for function in ir.functions:
        if function.kind == "external" and function.name in taken:
            raise LowerError(
                f"the external function {function.name!r} has the name of an op or a region, whose kernels are not for it",
                help="give it a name of its own",
            )
    return backend.laid_out(lower_module(ir, target, choose))


def takes(target: str, ir: IRModule, function: Function, weights: Collection[str]) -> bool:
    """Whether a kernel of a target runs calls of a fused function of `ir`, or of one that is not in it yet; `weights` are the operands that are weights."""
    builder = FunctionBuilder("probe", IRModule([*ir.functions, function]))
    operands = [
        builder.param(p.name, p.type, "weight" if p.name in weights else p.role) for p in function.params
    ]
    probe = builder.finish(builder.emit(FunctionCall(function.name, tuple(operands)), "probe"))
    program = lower_function(
        probe, {**{f.name: f for f in ir.functions}, function.name: function}, choose, target
    )
    return any(
        isinstance(run, Run) and run.op == function.attrs["region"] and run.kernel
        for run in program.body.walk()
    )


def choose(block: Block, frame: Frame, target: str) -> Block:
    """Return the block with the kernels of a target."""
    return select(block, frame, kernels_of(target), target)
