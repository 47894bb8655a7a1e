# SPDX-License-Identifier: Apache-2.0
"""Regions that one kernel can compute: the table that `outline` uses, and how to write another.

A pattern is a tree of ops, from the result down: `apply(ops.silu, PRODUCT)` is the activation of a product, and what a
tree leaves open is an operand of the region. The first pattern that fits wins, so longer ones come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnfront import ops
from nnfront.ir import Atom, Binding, Call, Op, Var


@dataclass(frozen=True)
class Tree:
    """One of some ops over operands, None for any operand; operands beyond those given are any too.

    `commutes`: the first two operands may stand either way around.
    """

    ops: tuple[Op, ...]
    operands: tuple[Tree | None, ...] = ()
    commutes: bool = False


@dataclass(frozen=True)
class Pattern:
    """A region by the name that its functions get."""

    name: str
    tree: Tree


def apply(op: Op | tuple[Op, ...], *operands: Tree | None, commutes: bool = False) -> Tree:
    """Return the tree of an op, or one of several, over operands."""
    return Tree(op if isinstance(op, tuple) else (op,), operands, commutes)


PRODUCT = apply((ops.linear, ops.matmul))
ACTIVATED = apply((ops.silu, ops.gelu, ops.relu), PRODUCT)

# What the matmul kernels can do to a finished tile: activation, gate, residual.
PATTERNS: tuple[Pattern, ...] = (
    Pattern("product_activation_residual", apply(ops.add, ACTIVATED, None, commutes=True)),
    Pattern("product_residual", apply(ops.add, PRODUCT, None, commutes=True)),
    Pattern("product_activation", ACTIVATED),
)


def find(tree: Tree, binding: Binding, inner: Mapping[Var, Binding]) -> list[Binding] | None:
    """Return the bindings of the region that ends in `binding`, that one last; None if the tree does not fit.

    `inner` are the bindings that may be part of a region without being its result.
    """
    call = binding.value
    if not isinstance(call, Call) or call.op not in tree.ops or not call.op.is_pure_for(call.args):
        return None
    orders = [call.args]
    if tree.commutes and len(call.args) > 1:
        orders.append((call.args[1], call.args[0], *call.args[2:]))
    for args in orders:
        found = _operands(tree, args, inner)
        if found is not None:
            return [*found, binding]
    return None


def _operands(
    tree: Tree, args: tuple[Atom | None, ...], inner: Mapping[Var, Binding]
) -> list[Binding] | None:
    found: list[Binding] = []
    if len(tree.operands) > len(args):
        return None
    for wanted, arg in zip(tree.operands, args, strict=False):
        if wanted is None:
            continue
        made = inner.get(arg) if isinstance(arg, Var) else None
        part = None if made is None else find(wanted, made, inner)
        if part is None:
            return None
        found += part
    return found
