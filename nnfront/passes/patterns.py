# SPDX-License-Identifier: Apache-2.0
"""How to say which regions of a function one kernel can compute: trees of ops, matched from the result down.

    apply(ops.silu, apply(ops.linear, "x", "weight", "bias"))

fits an activation of a product. A name stands for any operand, the same one wherever it is repeated; a kernel finds its operands by
these names. None stands for an operand that needs no name. `optional(tree, inner)` fits with or without `tree` around `inner`,
`field(tree, i)` is one field of a result with several, and one tree that occurs twice is one call that is read twice.

What is inside a region may be read by the region only, but for trees with `also_result`, whose values the region returns as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as with_default
from typing import Any, TypeAlias

from nnfront.dims import Dim
from nnfront.ir import Atom, Binding, Call, Op, Projection, Scalar, Var


@dataclass(frozen=True, eq=False)
class Tree:
    """A call of one of some ops. See `apply`."""

    ops: tuple[Op, ...]
    operands: tuple[Part, ...] = ()
    commutes: bool = False
    called: str = ""
    keeps: Mapping[str, str] = with_default(default_factory=dict)
    says: Mapping[str, Any] = with_default(default_factory=dict)
    where: Callable[[Call], bool] | None = None
    also_result: bool = False


@dataclass(frozen=True, eq=False)
class Field:
    """One field of what a tree gives."""

    tree: Tree
    index: int


@dataclass(frozen=True, eq=False)
class Either:
    """The first of several parts that fits."""

    options: tuple[Part, ...]


Part: TypeAlias = Tree | Field | Either | str | None


def apply(
    op: Op | tuple[Op, ...],
    *operands: Part,
    commutes: bool = False,
    called: str = "",
    keeps: Mapping[str, str] | None = None,
    says: Mapping[str, Any] | None = None,
    where: Callable[[Call], bool] | None = None,
    also_result: bool = False,
) -> Tree:
    """Return the tree of a call of `op`, or of one of several, over operands; operands beyond those given may be any.

    commutes: the first two operands may stand either way around. called: the region's attribute that tells which op it was.
    keeps: which attributes of the call the region has, and under which names; None is left out. says: further attributes of the region.
    where: a further condition on the call.
    also_result: others may read the value; the region returns it too.
    """
    return Tree(
        op if isinstance(op, tuple) else (op,),
        operands,
        commutes,
        called,
        keeps or {},
        says or {},
        where,
        also_result,
    )


def field(tree: Tree, index: int) -> Field:
    """Return one field of the tuple that a tree gives."""
    return Field(tree, index)


def optional(tree: Callable[[Part], Tree], inner: Part) -> Either:
    """Return `tree(inner)` or else `inner` alone."""
    return Either((tree(inner), inner))


@dataclass(frozen=True)
class Pattern:
    """A region by the name under which kernels know it: one of several trees, the first that fits.

    `where` is a condition on its named operands and attributes; `attrs` gives the attributes of the region, if not those that were kept.
    """

    name: str
    trees: tuple[Tree, ...]
    where: Callable[[Mapping[str, Any]], bool] | None = None
    attrs: Callable[[Match], Mapping[str, Any]] | None = None

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of all operands of all trees, in the order in which these have them."""
        return tuple(dict.fromkeys(name for tree in self.trees for name in _names(tree)))


def _names(part: Part) -> Iterator[str]:
    match part:
        case str():
            yield part
        case Tree():
            for operand in part.operands:
                yield from _names(operand)
        case Field():
            yield from _names(part.tree)
        case Either():
            for option in part.options:
                yield from _names(option)


@dataclass(frozen=True)
class Match:
    """What a pattern has found: operands and attributes by name, and the bindings by the part of the pattern that they fit."""

    operands: Mapping[str, Atom] = with_default(default_factory=dict)
    attrs: Mapping[str, Any] = with_default(default_factory=dict)
    bindings: Mapping[tuple[Tree, int | None], Binding] = with_default(default_factory=dict)

    @property
    def shared(self) -> set[Var]:
        """Values inside the region that others may read."""
        return {b.var for (tree, index), b in self.bindings.items() if tree.also_result and index is None}


def matches(pattern: Pattern, root: Binding, made: Mapping[Var, Binding]) -> Iterator[Match]:
    """Yield the ways in which the region that ends in `root` fits; `made` are the bindings that may be inside of it."""
    for tree in pattern.trees:
        for found in _call(tree, root, made, Match(), is_root=True):
            own = {b.var for b in found.bindings.values()}
            is_outside = own.isdisjoint(a for a in found.operands.values() if isinstance(a, Var))
            if is_outside and (pattern.where is None or pattern.where({**found.operands, **found.attrs})):
                yield found if pattern.attrs is None else replace(found, attrs=pattern.attrs(found))


def _part(part: Part, atom: Atom | None, made: Mapping[Var, Binding], found: Match) -> Iterator[Match]:
    match part:
        case None:
            yield found
        case str():
            yield from _operand(part, atom, found)
        case Either():
            for option in part.options:
                yield from _part(option, atom, made, found)
        case Tree():
            if isinstance(atom, Var) and atom in made:
                yield from _call(part, made[atom], made, found)
        case Field():
            binding = made.get(atom) if isinstance(atom, Var) else None
            if (
                binding is None
                or not isinstance(binding.value, Projection)
                or binding.value.index != part.index
            ):
                return
            for inside in _part(part.tree, binding.value.tuple, made, found):
                yield replace(inside, bindings={**inside.bindings, (part.tree, part.index): binding})


def _operand(name: str, atom: Atom | None, found: Match) -> Iterator[Match]:
    """A named operand: a value, a number, which the region keeps as an attribute, or none at all."""
    if name in found.operands or name in found.attrs:
        if found.operands.get(name) is atom:
            yield found
    elif isinstance(atom, Scalar):
        if not isinstance(atom.value, Dim):
            yield replace(found, attrs={**found.attrs, name: atom.value})
    elif atom is None:
        yield found
    else:
        yield replace(found, operands={**found.operands, name: atom})


def _call(
    tree: Tree, binding: Binding, made: Mapping[Var, Binding], found: Match, *, is_root: bool = False
) -> Iterator[Match]:
    call = binding.value
    if (
        not isinstance(call, Call)
        or call.op not in tree.ops
        or (tree.where is not None and not tree.where(call))
    ):
        return
    if not is_root and not call.op.is_pure_for(call.args):
        return  # what has an effect stays where it is: at the end
    known = found.bindings.get((tree, None))
    if known is not None:
        if known is binding:
            yield found
        return
    if any(binding is other for other in found.bindings.values()):
        return  # two trees are two calls
    given = call.op.full_attrs(call.attrs)
    attrs = {name: given[own] for own, name in tree.keeps.items() if given.get(own) is not None}
    attrs.update(tree.says)
    if tree.called:
        attrs[tree.called] = call.op.name
    if any(found.attrs.get(name, value) != value for name, value in attrs.items()):
        return
    here = replace(found, attrs={**found.attrs, **attrs}, bindings={**found.bindings, (tree, None): binding})
    orders = [call.args]
    if tree.commutes and len(call.args) > 1:
        orders.append((call.args[1], call.args[0], *call.args[2:]))
    if len(tree.operands) <= len(call.args):
        for args in orders:
            yield from _operands(tree.operands, args, made, here)


def _operands(
    parts: tuple[Part, ...], args: tuple[Atom | None, ...], made: Mapping[Var, Binding], found: Match
) -> Iterator[Match]:
    if not parts:
        yield found
        return
    for first in _part(parts[0], args[0], made, found):
        yield from _operands(parts[1:], args[1:], made, first)
