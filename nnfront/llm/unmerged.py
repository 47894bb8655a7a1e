# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA) in PEFT's layout, beside the weights: each sequence of a call has one of them, or none.

`nnfront.passes.add_adapters` shows what becomes of a method. The matrices of all adapters of a weight are one stack, filled up with zeros to the largest rank: derived tensors like
those that a model's author declares, so they are checked, lifted and streamed like all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from nnfront import ops
from nnfront.errors import LoadError, PassError
from nnfront.files import shown, shown_text
from nnfront.ir import FunctionBuilder, IRModule, Scalar, TensorType, Type, Var
from nnfront.llm.lora import NO_SPLIT, Adapter, Merging, Product, open_adapters
from nnfront.ops.encoded import cast
from nnfront.passes import add_adapters
from nnfront.quantized import Formula, Takes, derive_weights
from nnfront.weights import Checkpoint
from nnfront.weights.name_hints import shortened

MOST_ADAPTERS = 256
"""Of one model: the formulas of each weight name the matrices of every adapter."""

Adapters: TypeAlias = Mapping[str, str | Path]
"""Folders of adapters by the names that they are asked for by."""
NO_ADAPTERS: Adapters = {}

_MERGE = "merge the adapter into the weights: lora=[DIR] (--lora DIR)"


def open_named(adapters: Adapters, first: int = 0) -> dict[str, Adapter]:
    """Open adapters as `open_adapters` does. Raises LoadError for names that nobody could ask for, and for more than `MOST_ADAPTERS`."""
    if not isinstance(adapters, Mapping):
        raise LoadError(
            f"adapters is {shown(adapters)}, expected folders by name", help='write adapters={"NAME": DIR}'
        )
    for name in adapters:
        if not isinstance(name, str) or not name:
            raise LoadError(f"an adapter has the name {shown(name)}, expected a text that is not empty")
    if len(adapters) > MOST_ADAPTERS:
        raise LoadError(
            f"there are {len(adapters)} adapters, {MOST_ADAPTERS} are the most",
            help="serve the model several times, each with some of them",
        )
    opened = open_adapters([(path, 1.0) for path in adapters.values()], first)
    return dict(zip(adapters, opened, strict=True))


def keep_adapters(
    ir: IRModule, adapters: Sequence[Adapter], checkpoint: Checkpoint, takes: Takes
) -> IRModule:
    """Give methods an argument that says which adapter each sequence has, int32 [batch]: its place among these, -1 for none.

    The module is not lifted yet, and its weights are the model's own; `checkpoint` has the tensors of the adapters, too. Raises LoadError with all tensors of an adapter that fit no
    weight, or that can only be merged.
    """
    read = [_products(ir, adapter, checkpoint) for adapter in adapters]
    types = {name: type for _, stored, _ in read for name, type in stored.items()}
    names = dict.fromkeys(name for products, *_ in read for name in products)
    stacks = {name: _Stack([products.get(name) for products, *_ in read], types) for name in names}
    ranks = {name: stack.rank for name, stack in stacks.items()}
    transposed = [name for name, stack in stacks.items() if stack.is_transposed]
    try:
        module = add_adapters(ir, ranks, len(adapters), transposed)
    except PassError as error:
        raise LoadError(str(error)) from None
    formulas = {f"{name}.{end}": f for name, stack in stacks.items() for end, f in stack.formulas().items()}
    module = derive_weights(module, formulas, takes)[0]
    ignored = (*module.attrs.get("ignored", ()), *(name for *_, copies in read for name in copies))
    return IRModule(module.functions, {**module.attrs, "ignored": ignored})


def _products(
    ir: IRModule, adapter: Adapter, checkpoint: Checkpoint
) -> tuple[dict[str, Product], Mapping[str, TensorType], list[str]]:
    """What an adapter adds to products, by the names of weights; the types of its tensors; and those that say what the checkpoint does, as PEFT writes some. Raises LoadError for what it does besides."""
    merging = Merging(ir, NO_SPLIT)
    merging.add(adapter)
    problems, found, copies = [], {}, []
    for name, change in merging.changes.items():
        why = ""
        if change.replaced is not None and _are_equal(checkpoint, name, change.replaced):
            copies.append(change.replaced)
        elif change.replaced is not None:
            why = "another tensor takes its place (modules_to_save)"
        for each in change.products:
            if each.a is None:
                why = "it is a bias"
            elif each.magnitude is not None:
                why = "it is scaled as a whole (use_dora)"
            else:
                found[name] = each
        if why:
            problems.append((name, f"{shown_text(repr(name))}: {why}"))
    if problems:
        raise LoadError(
            f"{adapter.path}: the adapter changes weights by more than low-rank products, which alone can differ from text to text",
            details=shortened(problems),
            help=_MERGE,
        )
    return found, merging.stored, copies


def _are_equal(checkpoint: Checkpoint, one: str, two: str) -> bool:
    """Whether two tensors are there and the same."""
    if one not in checkpoint:
        return False
    types = [(info.shape, info.dtype) for info in map(checkpoint.info, (one, two))]
    return types[0] == types[1] and torch.equal(checkpoint[one], checkpoint[two])


@dataclass(frozen=True)
class _Stack:
    """What adapters add to products with one weight, None for those that leave it; and the types that their matrices are stored in."""

    adapters: Sequence[Product | None]
    types: Mapping[str, TensorType]

    @property
    def rank(self) -> int:
        """The largest."""
        return max(_sizes(self.types[each.a])[0] for each in self.adapters if each and each.a)

    @property
    def is_transposed(self) -> bool:
        """Whether the weight lies as [in, out]."""
        return any(each is not None and each.is_transposed for each in self.adapters)

    def formulas(self) -> dict[str, Formula]:
        """How the two stacks are made, by what their names end with: a [adapters, rank, in], and b [adapters, out, rank], in which the scales are."""
        return {f"lora_{side}": self.formula(side, axis) for axis, side in enumerate("ab")}

    def formula(self, side: str, axis: int) -> Formula:
        """How one of them is made, of matrices whose ranks lie along an axis."""
        names = [None if each is None else getattr(each, side) for each in self.adapters]
        sources = {name: self.types[name] for name in names if name is not None}

        def make(b: FunctionBuilder, found: Sequence[Var]) -> Var:
            stored = dict(zip(sources, found, strict=True))

            def matrix(each: Product) -> Var:
                made = cast(b, stored[getattr(each, side)], "float32")
                return made if side == "a" else b.call(ops.multiply, made, Scalar(each.scale))

            return self.stacked(b, [None if each is None else matrix(each) for each in self.adapters], axis)

        return Formula("LoRA", sources, make, is_plain=True)

    def stacked(self, b: FunctionBuilder, matrices: Sequence[Var | None], axis: int) -> Var:
        """Emit a stack of matrices; those of lower ranks, which lie along an axis, are filled up with zeros."""
        sizes = next(_sizes(each.type) for each in matrices if each is not None)
        zeros: dict[int, Var] = {}
        whole = []
        for matrix in matrices:
            missing = self.rank - (0 if matrix is None else _sizes(matrix.type)[axis])
            if missing and missing not in zeros:
                shape = [missing if i == axis else size for i, size in enumerate(sizes)]
                zeros[missing] = b.call(ops.zeros, shape=tuple(shape), dtype="float32")
            parts = [*([] if matrix is None else [matrix]), *([zeros[missing]] if missing else [])]
            whole.append(parts[0] if len(parts) == 1 else b.call(ops.concat, *parts, dim=axis))
        return b.call(ops.stack, *whole, dim=0)


def _sizes(type: Type) -> tuple[int, ...]:
    """The sizes of a matrix of a checkpoint."""
    assert isinstance(type, TensorType)
    return tuple(int(size) for size in type.shape)
