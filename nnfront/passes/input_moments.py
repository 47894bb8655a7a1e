# SPDX-License-Identifier: Apache-2.0
"""Compute what the weights of a method's products are multiplied with: of each the second moments of its inputs, summed over tokens.

example: input_moments(ir, "main")
before:
    def main[n](x: input float32[n, 4], w: weight float32[6, 4]) -> float32[n, 6] {
        h: float32[n, 4] = silu(x)
        y: float32[n, 6] = linear(h, w)
        return y
    }
after:
    def main[n](x: input float32[n, 4], w: weight float32[6, 4]) -> (float32[1, 4, 4],) attrs(moments_of=("w",)) {
        h: float32[n, 4] = silu(x)
        y: float32[n, 6] = linear(h, w)
        astype: float32[n, 4] = astype(h, dtype="float32")
        reshape: float32[n, 1, 4] = reshape(astype, shape=(n, 1, 4))
        permute_dims: float32[1, 4, n] = permute_dims(reshape, axes=(1, 2, 0))
        permute_dims_1: float32[1, n, 4] = permute_dims(reshape, axes=(1, 0, 2))
        matmul: float32[1, 4, 4] = matmul(permute_dims, permute_dims_1)
        moments: (float32[1, 4, 4],) = (matmul,)
        return moments
    }

The sums of `moments` over a text are what `quantize_calibrated` rounds weights by. Inputs are taken in blocks of at most `BLOCK` neighbours: moments between blocks would take
as much memory as the weights of a model many times over.

leaves:  no other method; primitive functions; experts but for the first product of each: what the second reads is computed inside one op.
"""

from __future__ import annotations

from math import prod

from nnfront import ops
from nnfront.ir import (
    Binding,
    Call,
    FunctionBuilder,
    IRModule,
    Names,
    TensorType,
    Tuple,
    Var,
    tensor_type,
    walk_bindings,
)
from nnfront.passes.base import module_pass
from nnfront.passes.inline import inline
from nnfront.passes.quantizing.reads import find_reads, taken

BLOCK = 512
"""The most neighbours among inputs whose products are summed."""


def block_of(inputs: int) -> int:
    """Return how many neighbours so many inputs are taken in blocks of: the most that divide them."""
    return next(size for size in range(min(BLOCK, inputs), 0, -1) if inputs % size == 0)


@module_pass()
def input_moments(ir: IRModule, method: str) -> IRModule:
    """Have a method return the second moments of the inputs of each weight in its attribute `moments_of`, [blocks, size, size], in the place of what it returns."""
    flat = inline.rewrite(ir, [f.name for f in ir.functions if f.kind == "private"])
    alone = flat.with_functions([f for f in flat.functions if f.name == method or f.kind != "public"])
    function, reads = alone[method], iter(find_reads(alone).in_order[method])
    builder = FunctionBuilder.of_bindings(Names.of(function), None)
    sums: dict[str, Var] = {}
    made: dict[Var, Var] = {}
    for binding in walk_bindings(function.bindings):
        for place, read in enumerate([next(reads) for _ in taken(binding.value)]):
            if read.weight is None or read.role == "embedding" or place > 0:
                continue
            given = _given(binding)
            if given is None or read.key.startswith(f"{method}: "):
                continue
            if given not in made:
                made[given] = _moments(builder, given)
            first = sums.get(read.key)
            sums[read.key] = made[given] if first is None else builder.call(ops.add, first, made[given])
    result = builder.emit(Tuple(tuple(sums.values())), "moments")
    bindings = (*function.bindings, *builder.finish(result).bindings)
    attrs = {**function.attrs, "moments_of": tuple(sums)}
    return alone.with_functions([function.with_(bindings=bindings, result=result, attrs=attrs)])


def _given(binding: Binding) -> Var | None:
    """What a product multiplies its weight with; None if nothing can be said of it."""
    assert isinstance(binding.value, Call)
    given = binding.value.args[0]
    if not isinstance(given, Var) or not isinstance(given.type, TensorType):
        return None
    return given if isinstance(given.type.shape[-1], int) else None


def _moments(builder: FunctionBuilder, given: Var) -> Var:
    *rows, inputs = tensor_type(given).shape
    assert isinstance(inputs, int)
    size = block_of(inputs)
    wide = builder.call(ops.astype, given, dtype="float32")
    shape = (prod(rows), inputs // size, size)
    blocks = builder.call(ops.reshape, wide, shape=shape)
    columns = builder.call(ops.permute_dims, blocks, axes=(1, 2, 0))
    return builder.call(ops.matmul, columns, builder.call(ops.permute_dims, blocks, axes=(1, 0, 2)))
