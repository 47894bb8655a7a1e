# SPDX-License-Identifier: Apache-2.0
"""Put the bodies of private and fused functions in the place of their calls.

before:
    private def layer[n](x: input float32[n, 4], w: weight float32[4, 4]) -> float32[n, 4] {
        h: float32[n, 4] = linear(x, w, None)
        y: float32[n, 4] = silu(h)
        return y
    }
    def main[m](x: input float32[m, 4], a: weight float32[4, 4], b: weight float32[4, 4]) -> float32[m, 4] {
        y: float32[m, 4] = @layer(x, a)
        z: float32[m, 4] = @layer(y, b)
        return z
    }
after:
    def main[m](x: input float32[m, 4], a: weight float32[4, 4], b: weight float32[4, 4]) -> float32[m, 4] {
        h: float32[m, 4] = linear(x, a, None)
        y: float32[m, 4] = silu(h)
        h_1: float32[m, 4] = linear(y, b, None)
        z: float32[m, 4] = silu(h_1)
        return z
    }

keeps:   types, effects and their order; a call's variable keeps its name; provenance is the call's followed by the body's.
leaves:  functions that are still called by others; external functions are never inlined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property

from nnfront.dims import Symbol, is_itself, of_symbol, substitute
from nnfront.errors import PassError
from nnfront.ir import (
    Binding,
    Function,
    FunctionCall,
    IRModule,
    Names,
    Provenance,
    Var,
    call_sizes,
    callees_first,
    symbols_in,
)
from nnfront.passes.base import module_pass
from nnfront.passes.sizes import Knowing, Resizer, SizeMap


@module_pass(sees_primitive=True)
def inline(ir: IRModule, functions: Iterable[str] | None = None) -> IRModule:
    """Inline the named private and fused functions, by default all. Those that nobody calls any more go."""
    chosen = _chosen(ir, functions)
    if not chosen:
        return ir
    done: dict[str, Function] = {}
    for function in callees_first(ir):
        if function.kind == "external":  # never touched, whatever it calls
            done[function.name] = function
            continue
        done[function.name] = _Inlining(function, done, lambda call, _: call.function in chosen).function(
            function
        )
    called = {callee for f in done.values() for callee in f.callees}
    return ir.with_functions(done[name] for name in ir if name not in chosen or name in called)


def inlined(function: Function, functions: Mapping[str, Function], calls: Collection[Var]) -> Function:
    """Return a function with bodies of private functions in the place of the calls that give it these variables; what those call stays a call."""
    return _Inlining(function, functions, lambda _, var: var in calls).function(function)


def _chosen(ir: IRModule, functions: Iterable[str] | None) -> frozenset[str]:
    can = [f.name for f in ir.functions if f.kind in ("private", "fused")]
    if functions is None:
        return frozenset(can)
    names = list(functions)
    wrong = [name for name in names if name not in can]
    if wrong:
        raise PassError(
            f"{wrong[0]!r} cannot be inlined: it is no private or fused function",
            details=[f"those are {', '.join(can) or 'none'}"],
        )
    return frozenset(names)


class _Inlining(Knowing):
    """Rewrites one function: the calls that are `chosen`, by themselves and what they are bound to. The bodies of `functions` contain none that is to be inlined any more."""

    def __init__(
        self,
        function: Function,
        functions: Mapping[str, Function],
        chosen: Callable[[FunctionCall, Var], bool],
    ) -> None:
        super().__init__()
        self.functions = functions
        self._is_chosen = chosen
        self._caller = function

    def binding(self, binding: Binding) -> Sequence[Binding]:
        value = self.expr(binding.value)
        self.values[binding.var] = value
        if isinstance(value, FunctionCall) and self._is_chosen(value, binding.var):
            return self._body(binding, value)
        return (binding.with_value(value),)

    def _body(self, binding: Binding, call: FunctionCall) -> Sequence[Binding]:
        callee = self.functions[call.function]
        resizer = Resizer(
            self._sizes(callee, call), self.functions, self._names.unique, _within(binding.provenance)
        )
        resizer.facts = self.facts
        resizer.replaced.update(zip(callee.params, call.args, strict=True))
        bindings = list(resizer.block(callee.body).bindings)
        result = resizer.atom(callee.result)
        if bindings and result is bindings[-1].var and result.type == binding.var.type:
            # The last binding takes the name of the call's variable.
            last = bindings[-1]
            bindings[-1] = Binding(binding.var, last.value, last.provenance)
        elif result.type == binding.var.type:
            self.replaced[binding.var] = result
        else:
            bindings.append(Binding(binding.var, result, binding.provenance))
        return bindings

    @cached_property
    def _names(self) -> Names:
        return Names.of(self._caller)

    @cached_property
    def _dims(self) -> Names:
        return Names(symbol.name for symbol in symbols_in(self._caller))

    def _sizes(self, callee: Function, call: FunctionCall) -> SizeMap | None:
        """What the callee's sizes are in the caller; None if they are called the same."""
        bound, _ = call_sizes(callee, [arg.type for arg in call.args])
        own = [symbol for symbol in symbols_in(callee) if symbol not in bound]  # its matches define them
        bound.update({s: of_symbol(Symbol(self._dims.unique(s.name), 0, *s.facts)) for s in own})
        if all(is_itself(symbol, size) for symbol, size in bound.items()):
            return None
        return lambda size: substitute(size, bound)


def _within(outer: Provenance | None) -> Callable[[Provenance | None], Provenance | None]:
    """Return the function that joins a callee's places to the call's."""

    def place(inner: Provenance | None) -> Provenance | None:
        if outer is None or inner is None:
            return inner or outer
        return inner.inside(outer.module)

    return place
