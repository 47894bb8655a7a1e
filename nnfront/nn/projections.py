# SPDX-License-Identifier: Apache-2.0
"""Linear layers that a checkpoint stores apart and a model multiplies as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from typing import TypeAlias

from nnfront.errors import SpecError
from nnfront.nn.activations import ACTIVATIONS
from nnfront.nn.functional import op
from nnfront.nn.layers import Linear
from nnfront.nn.mode import names_place
from nnfront.nn.module import Module
from nnfront.nn.parameter import joined
from nnfront.nn.tensor import Tensor

Order: TypeAlias = Callable[[Tensor], Tensor]


def pairs_as_halves(head_size: int, rotated: int) -> Order:
    """Return what reorders the rows of a weight or bias [heads * head_size, ...] so that pairs of neighbours become pairs of halves.

    Of each head the first `rotated` rows are taken. Scores stay the same if q and k are both reordered, and `op.rope` turns
    halves; so a checkpoint whose pairs are neighbours costs nothing more than others.
    """

    def reorder(x: Tensor) -> Tensor:
        more = x.shape[1:]
        heads = op.reshape(x, (x.shape[0] // head_size, head_size, *more))
        pairs = op.reshape(heads[:, :rotated], (heads.shape[0], rotated // 2, 2, *more))
        halves = op.permute_dims(pairs, (0, 2, 1, *range(3, 3 + len(more))))
        parts = [op.reshape(halves, (heads.shape[0], rotated, *more))]
        if rotated < head_size:
            parts.append(heads[:, rotated:])
        return op.reshape(op.concat(parts, 1), x.shape)

    return reorder


def part_by_part(x: Tensor, heads: int, parts: int = 3) -> Tensor:
    """A weight or bias [heads * parts * size, ...] that is stored head by head, as all heads of the first part, then of the second ..."""
    split = op.reshape(x, (heads, parts, x.shape[0] // (heads * parts), *x.shape[1:]))
    return op.reshape(op.permute_dims(split, (1, 0, *range(2, split.ndim))), x.shape)


def _ordered(tensors: Sequence[Tensor], orders: Sequence[Order | None]) -> list[Tensor]:
    return [t if order is None else order(t) for t, order in zip_longest(tensors, orders)] if tensors else []


class Fused(Module):
    """Several linear layers of one input as one product, whose weight and bias are derived from theirs.

    Calling it gives what each of them would, in order. The layers stay where they are, so the checkpoint's names are theirs.
    """

    @names_place
    def __init__(self, *parts: Linear, orders: Sequence[Order | None] = ()) -> None:
        """`orders`: for each layer what puts the rows of its weight and bias in another order, if anything does.

        Raises SpecError for less than two layers, and for layers of which some have a bias, or whose inputs differ in size.
        """
        biases = [part.bias for part in parts if part.bias is not None]
        if (
            len(parts) < 2
            or len({part.in_features for part in parts}) > 1
            or len(biases) not in (0, len(parts))
        ):
            shown = [
                f"[{p.in_features}] to [{p.out_features}], {'no ' * (p.bias is None)}bias" for p in parts
            ]
            raise SpecError(
                "nnfront.Fused: these layers are not one product",
                details=shown,
                help="give two layers or more of one input, either all with a bias or none",
            )
        self.weight = op.concat(_ordered([part.weight for part in parts], orders), 0)
        self.bias = op.concat(_ordered(biases, orders), 0) if biases else None
        sizes = [part.out_features for part in parts]
        is_halves = len(sizes) == 2 and sizes[0] == sizes[1]
        self.splits = 2 if is_halves else tuple(accumulate(sizes[:-1]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., in_features] to [..., out_features] of each layer."""
        return op.split(op.linear(x, self.weight, self.bias), self.splits, -1)


class GatedMLP(Module):
    """down(activation(gate(x)) * up(x)), gate and up as one product. Checkpoint names: gate_proj, up_proj, down_proj.

    `activation`: a name in `nnfront.ACTIVATIONS`. Source: GLU variants improve Transformer (arXiv 2002.05202).
    """

    def __init__(self, size: int, inner: int, activation: str = "silu", bias: bool = False) -> None:
        self.gate_proj = Linear(size, inner, bias)
        self.up_proj = Linear(size, inner, bias)
        self.down_proj = Linear(inner, size, bias)
        self.gate_up = Fused(self.gate_proj, self.up_proj)
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        gate, up = self.gate_up(x)
        return self.down_proj(self.activation(gate) * up)


class GateUpMLP(Module):
    """A `GatedMLP` whose gate and up are one matrix in the checkpoint. Names: gate_up_proj, down_proj."""

    def __init__(self, size: int, inner: int, activation: str = "silu", bias: bool = False) -> None:
        self.gate_up_proj = Linear(size, 2 * inner, bias)
        joined((inner, inner), self.gate_up_proj.weight, self.gate_up_proj.bias)
        self.down_proj = Linear(inner, size, bias)
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        gate, up = op.split(self.gate_up_proj(x), 2, -1)
        return self.down_proj(self.activation(gate) * up)


class MLP(Module):
    """second(activation(first(x))). `names` are those of the two in the checkpoint."""

    def __init__(
        self,
        size: int,
        inner: int,
        activation: str,
        bias: bool = True,
        names: tuple[str, str] = ("up_proj", "down_proj"),
    ) -> None:
        self.names = names
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[activation]
        for name, sizes in zip(names, ((size, inner), (inner, size)), strict=True):
            setattr(self, name, Linear(*sizes, bias))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        first, second = (getattr(self, name) for name in self.names)
        return second(self.activation(first(x)))
