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

A dim that is named anew keeps what is known of it. A transform is bound with the methods that use it. Private functions stay as they are: their dims are their own, and a call with
known sizes has a known result.

raises:  PassError for a dim that no function has, a size that the dim cannot be, and ops that are not defined for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nnfront.dims import (
    Dim,
    Size,
    Symbol,
    as_symbol,
    describe_facts,
    merge_facts,
    satisfies,
    substitute,
    to_size,
    with_facts,
    within,
)
from nnfront.errors import DimError, InferError, PassError
from nnfront.ir import NO_ATTRS, Atom, Function, IRModule, symbols_in
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


def bind(
    function: Function,
    sizes: Mapping[str, Size],
    functions: Mapping[str, Function],
    known: Mapping[str, Atom] = NO_ATTRS,
) -> Function:
    """Return the function with its dims of these names bound, and `known` in the place of parameters; see `bind_symbols`."""
    own = {s: sizes[s.name] for s in symbols_in(function) if s.name in sizes}
    return bind_symbols(
        function, own, functions, {p.name: known[p.name] for p in function.params if p.name in known}
    )


def bind_symbols(
    function: Function,
    sizes: Mapping[Symbol, Size],
    functions: Mapping[str, Function],
    known: Mapping[str, Atom] = NO_ATTRS,
) -> Function:
    """Return the function with these dims bound, and `known` in the place of the parameters of these names.

    It is the same object if there are none. Raises PassError for what cannot be.
    """
    if not sizes and not known:
        return function
    for symbol, size in sizes.items():
        _check(symbol, size, function.name)
    try:
        bound = _with_facts(sizes)
        return resize(function, lambda size: substitute(size, bound), functions, known)
    except (DimError, InferError) as error:
        given = ", ".join([*(_text(symbol, size) for symbol, size in sizes.items()), *known])
        raise PassError(f"{function.name} cannot have {given}: {error.what}", details=error.details) from None


def _with_facts(sizes: Mapping[Symbol, Size]) -> dict[Symbol, Size]:
    """The sizes over dims of which is known what the dims that they replace said: where `n: 2..8` becomes `2*m`, `m: 1..4`."""
    implied = [(own, f"for {symbol}") for symbol, size in sizes.items() if (own := _implied(symbol, size))]
    said = [(own, "its facts") for size in sizes.values() if isinstance(size, Dim) for own in size.symbols]
    merged = merge_facts([*said, *implied])
    return {symbol: with_facts(size, merged) for symbol, size in sizes.items()}


def _implied(symbol: Symbol, size: Size) -> Symbol | None:
    """The one dim of a size that is linear in it, with what follows from the facts of the dim that the size is to be."""
    found = within(size, *symbol.facts)
    if found is None:
        return None
    own, low, high, step = found
    return Symbol(own.name, own.uid, max(0, low or 0), high, step or 1)


def chosen_functions(ir: IRModule, names: Iterable[str] | None) -> list[str]:
    """Return the public functions that are meant, all for None. Raises PassError for a name that is none."""
    public = [f.name for f in ir.methods]
    wrong = [name for name in names if name not in public] if names is not None else []
    if wrong:
        raise PassError(
            f"there is no public function {wrong[0]!r}", details=[f"public functions are {', '.join(public)}"]
        )
    return public if names is None else list(names)


def _text(symbol: Symbol, size: Size) -> str:
    own = as_symbol(size)
    return f"{symbol} = {size}" if own != symbol else f"{symbol} {describe_facts(*own.facts)}"


def _check(symbol: Symbol, size: Size, function: str) -> None:
    if satisfies(size, symbol) is False:
        raise PassError(
            f"dim '{symbol.name}' of {function} cannot be {size}",
            details=[f"{symbol.name} is {describe_facts(*symbol.facts)}"],
        )
