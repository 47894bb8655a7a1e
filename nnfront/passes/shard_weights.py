# SPDX-License-Identifier: Apache-2.0
"""Let every rank take its part of weights: put formulas over whole weights in the place of the parts that methods read.

before:
    def main[n](x: input float32[n, 4], a.weight: weight float32[3, 4]) -> float32[n, 3] {
        y: float32[n, 3] = linear(x, a.weight)
        return y
    }
example: shard_weights(ir, {"a.weight": (0, 6, None)}, 2)
after:
    def main[n](x: input float32[n, 4], rank: weight int64[], a.weight: weight float32[6, 4]) -> float32[n, 3] attrs(derived=("a.weight.part",)) {
        a.weight.part: float32[3, 4] = shard(a.weight, rank, axis=0, world=2)
        y: float32[n, 3] = linear(x, a.weight.part)
        return y
    }

Before is what each of two ranks computes, after is that over the checkpoint's weights.

keeps:   what methods compute; formulas over the parts stay formulas, over those of whole weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from nnfront import ops
from nnfront.ir import (
    Binding,
    Function,
    IRModule,
    Mutator,
    Names,
    Param,
    TensorType,
    Var,
    canonical_call,
    tensor_type,
)
from nnfront.ops.collective import RANK, Blocks
from nnfront.passes.base import module_pass

Shard: TypeAlias = tuple[int, int, Blocks | None]
"""How a weight is cut: the axis, its size in the checkpoint, and the blocks that `shard` takes."""


@module_pass()
def shard_weights(ir: IRModule, shards: Mapping[str, Shard], world: int) -> IRModule:
    """Cut the weights named in `shards` among `world` ranks. `ir` is not lifted yet."""
    return ir.with_functions(_cut(f, shards, world) if f.kind == "public" else f for f in ir.functions)


def _cut(function: Function, shards: Mapping[str, Shard], world: int) -> Function:
    cut = [p for p in function.weights if p.name in shards]
    if not cut:
        return function
    known = next((p for p in function.params if p.name == RANK), None)
    rank = known or Param(RANK, TensorType((), "int64"), "weight")
    names, rewriting = Names.of(function), Mutator()
    head, whole = list[Binding](), dict[Var, Param]()
    for part in cut:
        axis, size, blocks = shards[part.name]
        own = tensor_type(part)
        type = TensorType((*own.shape[:axis], size, *own.shape[axis + 1 :]), own.dtype)
        whole[part] = Param(part.name, type, "weight")
        attrs = {"axis": axis, "world": world, "blocks": blocks}
        call = canonical_call(ops.shard, (whole[part], rank), attrs)
        rewriting.replaced[part] = var = Var(names.unique(f"{part.name}.part"), part.type)
        head.append(Binding(var, call))
    new = rewriting.function(function)
    params = [whole.get(p, p) for p in function.params]
    if known is None:
        params.insert(function.params.index(cut[0]), rank)
    derived = (*(b.var.name for b in head), *function.attrs.get("derived", ()))
    return replace(
        new,
        params=tuple(params),
        bindings=(*head, *new.bindings),
        attrs={**function.attrs, "derived": derived},
    )
