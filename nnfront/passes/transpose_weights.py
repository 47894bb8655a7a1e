# SPDX-License-Identifier: Apache-2.0
"""Multiply with weights in the order [out, in], in which a GPU's kernels read them: a weight in the other order is transposed by one more formula.

before:
    def main[n](x: input float16[n, 8], w: weight float16[8, 6], q: weight int8[6, 4], s: weight float16[1, 4]) -> float16[n, 4] {
        h: float16[n, 6] = matmul(x, w)
        d: float16[6, 4] = dequantize(q, s, axis=0)
        y: float16[n, 4] = matmul(h, d)
        return y
    }
after:
    def main[n](x: input float16[n, 8], w: weight float16[8, 6], q: weight int8[6, 4], s: weight float16[1, 4]) -> float16[n, 4] {
        permute_dims: float16[6, 8] = permute_dims(w, axes=(1, 0))
        h: float16[n, 6] = linear(x, permute_dims)
        permute_dims_1: int8[4, 6] = permute_dims(q, axes=(1, 0))
        permute_dims_2: float16[4, 1] = permute_dims(s, axes=(1, 0))
        dequantize: float16[4, 6] = dequantize(permute_dims_1, permute_dims_2, axis=1)
        y: float16[n, 4] = linear(h, dequantize)
        return y
    }

What is made of weights is transposed by transposing what it is made of: a transpose by leaving it out, a dequantised weight by its stored form. Lifting
moves the formula into the transform, unless something else reads the weight in its old order: then it stays a view, and no second copy is kept.
"""

from __future__ import annotations

from nnfront import ops
from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Function,
    FunctionBuilder,
    IRModule,
    Mutator,
    Names,
    TensorType,
    Var,
    walk_bindings,
)
from nnfront.passes.base import module_pass
from nnfront.passes.effects import impure_functions
from nnfront.passes.eliminate_dead_code import without_dead_bindings
from nnfront.passes.weight_values import weight_values


@module_pass()
def transpose_weights(ir: IRModule) -> IRModule:
    """Rewrite products whose weight is [in, out]."""
    impure = impure_functions(ir)
    return ir.with_functions(
        _transposed(f, impure) if f.kind in ("public", "private") else f for f in ir.functions
    )


def _transposed(function: Function, impure: set[str]) -> Function:
    new = _Transposing(function).function(function)
    return function if new is function else without_dead_bindings(new, impure)


def transposed(builder: FunctionBuilder, weight: Var, made: dict[Var, Binding]) -> Var:
    """Return the transpose of a matrix; `made` tells what weights are made of."""
    binding = made.get(weight)
    call = None if binding is None else binding.value
    if isinstance(call, Call):
        given = call.op.full_attrs(call.attrs)
        if call.op is ops.permute_dims and given["axes"] == (1, 0) and isinstance(call.args[0], Var):
            return call.args[0]
        if call.op in (ops.dequantize, ops.unpack_int4):
            operands = [transposed(builder, a, made) if isinstance(a, Var) else a for a in call.args]
            return builder.call(call.op, *operands, **{**given, "axis": 1 - given["axis"]})
    return builder.call(ops.permute_dims, weight, axes=(1, 0))


class _Transposing(Mutator):
    """Rewrites one function."""

    def __init__(self, function: Function) -> None:
        self.known: dict[Var, Var] = {}
        super().__init__(self.known)
        self.names = Names.of(function)
        self.weights = weight_values(function).all
        self.made = {binding.var: binding for binding in walk_bindings(function.bindings)}

    def binding(self, binding: Binding) -> list[Binding]:
        call = binding.value
        if not isinstance(call, Call) or call.op is not ops.matmul or not self._is_weight(call.args[1]):
            return list(super().binding(binding))
        x, weight = call.args
        assert isinstance(weight, Var)
        builder = FunctionBuilder.of_bindings(self.names, binding.provenance)
        if weight not in self.known:
            self.known[weight] = transposed(builder, weight, self.made)
        new = Call(ops.linear, (x, self.known[weight], None), call.attrs)
        return [*builder.finish(self.known[weight]).bindings, binding.with_value(new)]

    def _is_weight(self, right: Atom | None) -> bool:
        return (
            isinstance(right, Var)
            and right in self.weights
            and isinstance(right.type, TensorType)
            and right.type.ndim == 2
        )
