# SPDX-License-Identifier: Apache-2.0
"""Give dims a value: what was symbolic becomes a number, or another size.

example: bind_dims(ir, {"batch": 1})
before:
    def main[batch](x: input float32[batch, 4], w: weight float32[8, 4]) -> float32[batch*8] {
        y: float32[batch, 8] = linear(x, w, None)
        z: float32[batch*8] = reshape(y, shape=(batch*8,))
        return z
    }
after:
    def main(x: input float32[1, 4], w: weight float32[8, 4]) -> float32[8] {
        y: float32[1, 8] = linear(x, w, None)
        z: float32[8] = reshape(y, shape=(8,))
        return z
    }

A transform is bound with the methods that use it. Private functions stay as they are: their dims are their own, and a call with
known sizes has a known result.

raises:  PassError for a dim that no function has, a size that the dim cannot be, and ops that are not defined for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nnfront.dims import Dim, Size, Symbol, describe_facts, satisfies, substitute, to_size
from nnfront.errors import InferError, PassError
from nnfront.ir import Function, IRModule, symbols_in
from nnfront.passes.base import module_pass
from nnfront.passes.sizes import resize


@module_pass()
def bind_dims(
    ir: IRModule, dims: Mapping[str, int | str | Dim], functions: Iterable[str] | None = None
) -> IRModule:
    """Bind dims by name in the named functions, by default in all public ones."""
    sizes = {name: to_size(size) for name, size in dims.items()}
    bound = [ir[name] for name in chosen_functions(ir, functions)]
    transforms = dict.fromkeys(f.attrs["transform"] for f in bound if "transform" in f.attrs)
    bound += [ir[name] for name in transforms]
    known = {symbol.name for f in bound for symbol in f.symbols}
    unknown = [name for name in sizes if name not in known]
    if unknown:
        raise PassError(
            f"no function has a dim '{unknown[0]}'",
            details=[
                f"the dims of {', '.join(f.name for f in bound)} are {', '.join(sorted(known)) or 'none'}"
            ],
        )
    done = {f.name: bind(f, sizes, ir) for f in bound}
    return ir.with_functions(done.get(f.name, f) for f in ir.functions)


def bind(function: Function, sizes: Mapping[str, Size], functions: Mapping[str, Function]) -> Function:
    """Return the function with its dims of these names bound; the same object if it has none of them."""
    return bind_symbols(
        function, {s: sizes[s.name] for s in symbols_in(function) if s.name in sizes}, functions
    )


def bind_symbols(
    function: Function, sizes: Mapping[Symbol, Size], functions: Mapping[str, Function]
) -> Function:
    """Return the function with these dims bound; the same object if there are none. Raises PassError for what cannot be."""
    if not sizes:
        return function
    for symbol, size in sizes.items():
        _check(symbol, size, function.name)
    try:
        return resize(function, lambda size: substitute(size, sizes), functions)
    except InferError as error:
        given = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
        raise PassError(f"{function.name} cannot have {given}: {error.what}", details=error.details) from None


def chosen_functions(ir: IRModule, names: Iterable[str] | None) -> list[str]:
    """Return the public functions that are meant, all for None. Raises PassError for a name that is none."""
    public = [f.name for f in ir.methods]
    wrong = [name for name in names if name not in public] if names is not None else []
    if wrong:
        raise PassError(
            f"there is no public function {wrong[0]!r}", details=[f"public functions are {', '.join(public)}"]
        )
    return public if names is None else list(names)


def _check(symbol: Symbol, size: Size, function: str) -> None:
    if satisfies(size, symbol) is False:
        raise PassError(
            f"dim '{symbol.name}' of {function} cannot be {size}",
            details=[f"{symbol.name} is {describe_facts(*symbol.facts)}"],
        )
