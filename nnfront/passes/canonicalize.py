# SPDX-License-Identifier: Apache-2.0
"""Write what can be written in several ways in one, the shortest: no alias, no cast or reshape to what it is already.

before:
    def main[n](x: input float32[n, 4], w: weight float32[8, 4]) -> float32[n, 8] {
        t: float32[4, 8] = permute_dims(w, axes=(1, 0))
        u: float32[8, 4] = permute_dims(t, axes=(1, 0))
        same: float32[n, 4] = astype(x, dtype="float32")
        pair: (float32[n, 4], float32[8, 4]) = (same, u)
        v: float32[8, 4] = pair[1]
        y: float32[n, 8] = linear(same, v, None)
        return y
    }
after:
    def main[n](x: input float32[n, 4], w: weight float32[8, 4]) -> float32[n, 8] {
        t: float32[4, 8] = permute_dims(w, axes=(1, 0))
        pair: (float32[n, 4], float32[8, 4]) = (x, w)
        y: float32[n, 8] = linear(x, w, None)
        return y
    }

keeps:   types, effects, and what nobody reads any more, which is for dead code elimination.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from nnfront import dtypes, ops
from nnfront.dims import same_shape
from nnfront.ir import (
    Atom,
    Binding,
    Block,
    Call,
    Constant,
    Expr,
    Function,
    If,
    IRModule,
    MatchShape,
    Mutator,
    Op,
    Projection,
    Scalar,
    Tuple,
    TupleType,
    Type,
    Var,
    canonical_call,
    tensor_type,
)
from nnfront.passes.base import module_pass

Definitions: TypeAlias = Mapping[Var, Expr]
Rule: TypeAlias = Callable[[Call, Type, Definitions], Expr | None]


@module_pass()
def canonicalize(ir: IRModule) -> IRModule:
    """Bring every function to canonical form."""
    return ir.with_functions(map(canonical, ir.functions))


def canonical(function: Function) -> Function:
    """Return the canonical form of one function."""
    return _Canonical().function(function)


class _Canonical(Mutator):
    """Rewrites one function. `definitions` are the expressions of the variables in scope, canonical already."""

    def __init__(self) -> None:
        super().__init__()
        self.definitions: dict[Var, Expr] = {}

    def binding(self, binding: Binding) -> Sequence[Binding]:
        value = binding.value
        if isinstance(value, If):
            taken = _taken_branch(self.atom(value.condition), value)
            if taken is not None and taken.result.type == binding.var.type:
                block = self.block(taken)
                self.replaced[binding.var] = block.result
                return block.bindings
        value = simplify(self.expr(value), binding.var.type, self.definitions)
        if isinstance(value, Var | Constant | Scalar) and value.type == binding.var.type:
            self.replaced[binding.var] = value
            return ()
        self.definitions[binding.var] = value
        return (binding.with_value(value),)


def simplify(expr: Expr, type: Type, definitions: Definitions) -> Expr:
    """Return the canonical form of an expression of this type whose operands are canonical."""
    while True:
        new = _step(expr, type, definitions)
        if new is None:
            return expr
        expr = new


def _step(expr: Expr, type: Type, definitions: Definitions) -> Expr | None:
    match expr:
        case Call():
            for rule in RULES.get(expr.op, ()):
                new = rule(expr, type, definitions)
                if new is not None:
                    return new
        case Projection() if isinstance(expr.tuple, Var):
            made = definitions.get(expr.tuple)
            if isinstance(made, Tuple) and made.fields[expr.index].type == type:
                return made.fields[expr.index]
        case MatchShape() if expr.value.type == expr.type:
            return expr.value
    return None


def _taken_branch(condition: Atom, branches: If) -> Block | None:
    """The branch that is always taken, if the condition is a literal."""
    if isinstance(condition, Scalar):
        return branches.then if condition.value else branches.otherwise
    if isinstance(condition, Constant):
        return branches.then if any(condition.data) else branches.otherwise
    return None


def _same_type(call: Call, type: Type, definitions: Definitions) -> Expr | None:
    """A cast, reshape or broadcast to what the operand is already."""
    x = call.args[0]
    return x if x is not None and x.type == type else None


def _there_and_back(call: Call, type: Type, definitions: Definitions) -> Expr | None:
    """A cast to a wider dtype of the same kind and back."""
    inner = _operand(call, definitions)
    if inner is None:
        return None
    x, middle = inner.args[0], call.args[0]
    if x is None or x.type != type:
        return None
    narrow, wide = tensor_type(x).dtype, tensor_type(middle).dtype
    is_exact = dtypes.category(narrow) == dtypes.category(wide) and dtypes.size_bytes(
        narrow
    ) < dtypes.size_bytes(wide)
    # Of two bytes and more, the wider of one kind holds the narrower; int8 in uint16 and float8 formats need not be asked for.
    return x if is_exact and dtypes.size_bytes(narrow) > 1 else None


def _reshape_of_reshape(call: Call, type: Type, definitions: Definitions) -> Expr | None:
    """reshape(reshape(x)): reshape(x)."""
    inner = _operand(call, definitions)
    return None if inner is None else Call(call.op, inner.args, call.attrs)


def _permuted_twice(call: Call, type: Type, definitions: Definitions) -> Expr | None:
    """permute_dims(permute_dims(x)): one permutation, or x."""
    axes = call.attrs["axes"]
    if axes == tuple(range(len(axes))):
        return call.args[0]
    inner = _operand(call, definitions)
    if inner is None:
        return None
    return Call(call.op, inner.args, {"axes": tuple([inner.attrs["axes"][axis] for axis in axes])})


def _whole(call: Call, type: Type, definitions: Definitions) -> Expr | None:
    """x[...]: x."""
    return call.args[0] if call.attrs["index"] == () else None


def _only_part(call: Call, type: Type, definitions: Definitions) -> Expr | None:
    """concat of one tensor: the tensor."""
    return call.args[0] if len(call.args) == 1 else None


def _parts_of_join(call: Call, type: Type, definitions: Definitions) -> Expr | None:
    """split, into equal parts, of what these were joined to: the parts. Parts at positions stay, as attention on a CPU reads q, k and v side by side."""
    made = definitions.get(call.args[0]) if isinstance(call.args[0], Var) else None
    if not isinstance(made, Call) or made.op is not ops.concat:
        return None
    axes = (each.op.full_attrs(each.attrs)[name] for each, name in ((call, "axis"), (made, "dim")))
    is_equal = isinstance(call.attrs["indices_or_sections"], int) and len(set(axes)) == 1
    parts = Tuple(tuple(part for part in made.args if part is not None))
    return parts if is_equal and type == TupleType(tuple(part.type for part in parts.fields)) else None


def _known_mask(call: Call, type: Type, definitions: Definitions) -> Expr | None:
    """Attention under a mask that is made here: zeros are no mask, and the causal one is `is_causal`."""
    query, key, value, mask = call.args
    made = definitions.get(mask) if isinstance(mask, Var) else None
    if not isinstance(made, Call):
        return None
    is_causal = _makes_causal_mask(made, definitions)
    if not is_causal and not (made.op is ops.zeros and made.attrs.get("dtype") != "bool"):
        return None
    sizes = (tensor_type(query).shape[1], tensor_type(key).shape[1])
    if is_causal and not same_shape(tensor_type(mask).shape[-2:], sizes):
        return None
    attrs = {**call.attrs, "is_causal": True} if is_causal else call.attrs
    return canonical_call(call.op, (query, key, value, None), attrs)


def _makes_causal_mask(made: Call, definitions: Definitions) -> bool:
    """Whether a call makes a mask under which query i sees keys 0 ... i."""
    inner = definitions.get(made.args[0]) if made.args and isinstance(made.args[0], Var) else None
    if not isinstance(inner, Call):
        return False
    if made.op is ops.tril and made.attrs.get("diagonal", 0) == 0:
        return inner.op is ops.ones and inner.attrs.get("dtype") == "bool"
    fill = inner.args[0] if inner.op is ops.full else None
    return (
        made.op is ops.triu
        and made.attrs.get("diagonal", 0) == 1
        and isinstance(fill, Scalar)
        and fill.value == -math.inf
    )


def _operand(call: Call, definitions: Definitions) -> Call | None:
    """The call of the same op that makes the first operand."""
    made = definitions.get(call.args[0]) if isinstance(call.args[0], Var) else None
    return made if isinstance(made, Call) and made.op is call.op else None


RULES: Mapping[Op, tuple[Rule, ...]] = {
    ops.astype: (_same_type, _there_and_back),
    ops.broadcast_to: (_same_type,),
    ops.concat: (_only_part,),
    ops.getitem: (_whole,),
    ops.permute_dims: (_permuted_twice,),
    ops.reshape: (_same_type, _reshape_of_reshape),
    ops.scaled_dot_product_attention: (_known_mask,),
    ops.split: (_parts_of_join,),
    ops.squeeze: (_same_type,),
}
