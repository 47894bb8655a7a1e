# SPDX-License-Identifier: Apache-2.0
"""Compute now what depends on constants alone.

before:
    def main(x: input float32[4]) -> float32[4] {
        half: float32[] = multiply(const(float32[], [4.0]), 0.5)
        scale: float32[] = rsqrt(half)
        y: float32[4] = multiply(x, scale)
        return y
    }
after:
    def main(x: input float32[4]) -> float32[4] {
        y: float32[4] = multiply(x, const(float32[], [0.70710677]))
        return y
    }

A call is folded if its result takes no more bytes than its constant operands, or has at most 16 elements: a module does not grow.
Effects, and what `stop_lift_params` marks, stay; so does what the reference refuses to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from nnfront import ops
from nnfront.ir import Binding, Call, Constant, IRModule, Mutator, TensorType, Type, Var
from nnfront.ir.walk import sizes_read
from nnfront.ops.constants import constant, value_of
from nnfront.passes.base import module_pass

# Elements that a result may have though no constant pays for it.
_FREE = 16

# `empty` has no value to fold to.
_NEVER = frozenset({ops.empty, ops.stop_lift_params})


@module_pass()
def fold_constants(ir: IRModule) -> IRModule:
    """Fold constants in every function."""
    return ir.with_functions(_Folding().function(f) for f in ir.functions)


class _Folding(Mutator):
    def binding(self, binding: Binding) -> Sequence[Binding]:
        value = self.expr(binding.value)
        if isinstance(value, Call):
            folded = fold(value, binding.var.type)
            if folded is not None:
                self.replaced[binding.var] = folded
                return ()
        if isinstance(value, Constant):
            self.replaced[binding.var] = value
            return ()
        return (binding.with_value(value),)


def fold(call: Call, type: Type) -> Constant | None:
    """Return the value of a call over constants, None if it is not to be folded."""
    if call.op in _NEVER or not call.op.is_pure_for(call.args) or not isinstance(type, TensorType):
        return None
    if any(isinstance(a, Var) for a in call.args) or next(sizes_read(call), None) is not None:
        return None
    if not _pays(call, type):
        return None
    try:
        result = call.op.run([None if a is None else value_of(a) for a in call.args], call.attrs)
    except (RuntimeError, ArithmeticError):
        return None
    if not isinstance(result, torch.Tensor):
        return None  # the op is not nnfront's own, and what it returns is refused when it runs
    folded = constant(result)
    return folded if folded.type == type else None


def _pays(call: Call, type: TensorType) -> bool:
    """Whether the result takes no more than it replaces, or hardly anything."""
    if type.static_shape is None or type.size_bytes is None:
        return False
    replaced = sum(len(a.data) for a in call.args if isinstance(a, Constant))
    return prod(type.static_shape) <= _FREE or type.size_bytes <= replaced
