# SPDX-License-Identifier: Apache-2.0
"""Remove what nobody needs: bindings without effect that no result depends on, and functions that nothing calls.

before:
    private def unused(x: input float32[4]) -> float32[4] {
        return x
    }
    def main(x: input float32[4]) -> float32[4] {
        a: float32[4] = add(x, 1.0)
        b: float32[4] = multiply(a, 2.0)
        p: () = print_(x)
        return a
    }
after:
    def main(x: input float32[4]) -> float32[4] {
        a: float32[4] = add(x, 1.0)
        p: () = print_(x)
        return a
    }

keeps:   public and external functions, the transforms of public functions, the bodies of primitive functions, all parameters.
"""

from __future__ import annotations

from nnfront.ir import Binding, Block, Function, If, IRModule, Var, are_same, map_expr, reached, used_vars
from nnfront.passes.base import module_pass
from nnfront.passes.effects import impure_functions, is_alive


@module_pass(sees_primitive=True)
def eliminate_dead_code(ir: IRModule) -> IRModule:
    """Remove dead bindings, then dead functions. It sees primitive functions, for what they call."""
    impure = impure_functions(ir)
    ir = ir.with_functions(f if f.is_primitive else without_dead_bindings(f, impure) for f in ir.functions)
    roots = [f for f in ir.functions if f.kind in ("public", "external")]
    roots += [ir[f.attrs["transform"]] for f in roots if "transform" in f.attrs]
    live = reached(ir, roots) | {f.name for f in roots}
    return ir.with_functions(f for f in ir.functions if f.name in live)


def without_dead_bindings(function: Function, impure: set[str]) -> Function:
    """Return the function without bindings that nobody needs."""
    needs = {function.result} if isinstance(function.result, Var) else set()
    body = _live_block(function.body, needs, impure)
    is_same = are_same(body.bindings, function.bindings)
    return function if is_same else function.with_(bindings=body.bindings)


def _live_block(block: Block, needs: set[Var], impure: set[str]) -> Block:
    """Keep what is alive, from the end; `needs` collects what that reads."""
    if isinstance(block.result, Var):
        needs.add(block.result)
    bindings: list[Binding] = []
    for binding in reversed(block.bindings):
        if is_alive(binding, needs, impure):
            value = binding.value
            if isinstance(value, If):
                live = map_expr(value, lambda atom: atom, lambda b: _live_block(b, needs, impure))
                binding = binding.with_value(live)
                if isinstance(value.condition, Var):
                    needs.add(value.condition)
            else:
                needs.update(used_vars(value))
            bindings.append(binding)
    bindings.reverse()
    return block if are_same(bindings, block.bindings) else Block(tuple(bindings), block.result)
