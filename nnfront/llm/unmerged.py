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
from nnfront.llm.lora import NO_SPLIT, Adapter, Merging, open_adapters
from nnfront.passes import add_adapters
from nnfront.quantized import Formula, Takes, derive_weights
from nnfront.quantized.formula import cast
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
    found, ignored = [products for products, _ in read], [name for _, copies in read for name in copies]
    names = list(dict.fromkeys(name for products in found for name in products))
    stacks = {name: _Stack([products.get(name) for products in found]) for name in names}
    ranks = {name: stack.rank for name, stack in stacks.items()}
    turned = [name for name, stack in stacks.items() if stack.is_transposed]
    try:
        module = add_adapters(ir, ranks, len(adapters), turned)
    except PassError as error:
        raise LoadError(str(error)) from None
    formulas = {f"{name}.{end}": f for name, stack in stacks.items() for end, f in stack.formulas().items()}
    module = derive_weights(module, formulas, takes)[0]
    return IRModule(
        module.functions, {**module.attrs, "ignored": (*module.attrs.get("ignored", ()), *ignored)}
    )


@dataclass(frozen=True)
class _LowRank:
    """What one adapter adds to products with a weight: scale * B A; the types that the matrices are stored in are those of tensors of these names."""

    scale: float
    a: str
    b: str
    types: Mapping[str, TensorType]
    is_transposed: bool

    @property
    def rank(self) -> int:
        return _sizes(self.types[self.a])[0]

    def matrix(self, b: FunctionBuilder, side: str, stored: Mapping[str, Var]) -> Var:
        """Emit A or B in float32; in B is the scale."""
        found = cast(b, stored[getattr(self, side)], "float32")
        return found if side == "a" else b.call(ops.multiply, found, Scalar(self.scale))


def _products(
    ir: IRModule, adapter: Adapter, checkpoint: Checkpoint
) -> tuple[dict[str, _LowRank], list[str]]:
    """What an adapter adds to products, by the names of weights; and its tensors that say what the checkpoint does, as PEFT writes some. Raises LoadError for what it does besides."""
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
                found[name] = _LowRank(each.scale, each.a, each.b, merging.stored, each.is_transposed)
        if why:
            problems.append((name, f"{shown_text(repr(name))}: {why}"))
    if problems:
        raise LoadError(
            f"{adapter.path}: the adapter changes weights by more than low-rank products, which alone can differ from text to text",
            details=shortened(problems),
            help=_MERGE,
        )
    return found, copies


def _are_equal(checkpoint: Checkpoint, one: str, two: str) -> bool:
    """Whether two tensors are there and the same."""
    if one not in checkpoint:
        return False
    types = [(info.shape, info.dtype) for info in map(checkpoint.info, (one, two))]
    return types[0] == types[1] and torch.equal(checkpoint[one], checkpoint[two])


@dataclass(frozen=True)
class _Stack:
    """What adapters add to products with one weight; None for those that leave it."""

    adapters: Sequence[_LowRank | None]

    @property
    def rank(self) -> int:
        """The largest."""
        return max(each.rank for each in self.adapters if each is not None)

    @property
    def is_transposed(self) -> bool:
        """Whether the weight lies as [in, out]."""
        return any(each is not None and each.is_transposed for each in self.adapters)

    def formulas(self) -> dict[str, Formula]:
        """How the two stacks are made, by what their names end with: a [adapters, rank, in], and b [adapters, out, rank], in which the scales are."""
        return {f"lora_{side}": self.formula(side, axis) for axis, side in enumerate("ab")}

    def formula(self, side: str, axis: int) -> Formula:
        """How one of them is made, of matrices whose ranks lie along an axis."""
        held = [each for each in self.adapters if each is not None]
        sources = {name: each.types[name] for each in held for name in (getattr(each, side),)}

        def make(b: FunctionBuilder, found: Sequence[Var]) -> Var:
            stored = dict(zip(sources, found, strict=True))
            matrices = [None if each is None else each.matrix(b, side, stored) for each in self.adapters]
            return self.stacked(b, matrices, axis)

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
