# SPDX-License-Identifier: Apache-2.0
"""A model divided among ranks: each computes the same model with fewer heads, narrower layers and a part of the vocabulary.

`divide` compares the model that a rank computes with the whole one. Where a linear layer takes fewer features than the whole one does, its result is a part
of a sum, which ranks add up; a head that gives fewer logits than the whole one is put together of all ranks', and so on. What has the same
shape in both is replicated.

A plan is a list of what became of each weight:

    column       a linear layer's outputs are divided, or whatever else has a number for each of what is divided
    row          its inputs are divided, and ranks add up what it gives
    vocabulary   rows of an embedding, or outputs of the head
    expert       each rank has some of the experts, as they are
    replicated   every rank has all of it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from nnfront.dims import Size
from nnfront.errors import SpecError
from nnfront.ir import TensorType, type_text
from nnfront.nn.alibi import ALiBi
from nnfront.nn.experts import Experts, StackedExperts
from nnfront.nn.functional import op
from nnfront.nn.gated import GatedRMSNorm
from nnfront.nn.layers import Embedding, GroupNorm, LayerNorm, Linear, RMSNorm
from nnfront.nn.module import Module
from nnfront.nn.mutator import Mutator
from nnfront.nn.parameter import JOINED, Parameter
from nnfront.nn.tensor import Tensor
from nnfront.ops.collective import RANK, Blocks

Style: TypeAlias = Literal["column", "row", "vocabulary", "expert", "replicated"]

Layer = TypeVar("Layer", bound=Module)

HEADS = ("lm_head", "embed_out", "output")
"""What checkpoints call the layer that gives logits: of a rank's part of the vocabulary all others' are wanted too."""


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """What becomes of a weight: its type as stored and as a rank holds it, the axis that is cut, None where none is, and its blocks, as `op.shard` takes them."""

    style: Style
    whole: TensorType
    part: TensorType
    axis: int | None = None
    blocks: Blocks | None = None


@dataclass(frozen=True)
class Plan:
    """What becomes of each weight, by name, where a model is divided among `world` ranks. It prints as a table."""

    world: int
    weights: dict[str, PlannedWeight]

    def __str__(self) -> str:
        lines = [f"{self.world} ranks"]
        for name, planned in self.weights.items():
            cut = "" if planned.axis is None else f" along axis {planned.axis}"
            if planned.blocks is not None:
                cut += ", " + " and ".join(f"{size} in {parts}" for size, parts in planned.blocks)
            lines.append(f"  {name}: {type_text(planned.whole)} {planned.style}{cut}")
        return "\n".join(lines)


def _as(kind: type[Layer], layer: Module, **more: Any) -> Layer:
    """Return a layer with what another has, and more: of a kind that says what ranks do, behind which the other's class says what a rank computes."""
    base = type(layer)
    made: Layer = object.__new__(
        kind if issubclass(kind, base) else type(f"Rank{base.__name__}", (kind, base), {})
    )
    vars(made).update({**vars(layer), **more})
    return made


class RowLinear(Linear):
    """A linear layer that takes a rank's part of its inputs; ranks add up their products. weight [out_features, part of in_features]."""

    world: int

    def forward(self, x: Tensor) -> Tensor:
        """[..., part of in_features] to [..., out_features]."""
        product = (
            op.matmul(x, op.permute_dims(self.weight), self.out_dtype)
            if self.out_dtype
            else op.linear(x, self.weight)
        )
        y: Tensor = op.all_reduce(product, self.world)
        return y if self.bias is None else op.add(y, self.bias)


class GatheredLinear(Linear):
    """A linear layer that computes a rank's part of its outputs and takes those of others. weight [part of out_features, in_features]."""

    outputs: Size
    world: int

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., outputs]."""
        y: Tensor = op.all_gather(super().forward(x), -1, self.world)
        return y if y.shape[-1] == self.outputs else y[..., : self.outputs]


class RankEmbedding(Embedding):
    """A rank's rows of a table, zeros for all others; ranks add up what they find. weight [part of num, dim]."""

    first: Tensor
    world: int

    def forward(self, x: Tensor) -> Tensor:
        """Integers [...] to [..., dim]."""
        place = op.subtract(x, self.first)
        is_here = op.logical_and(op.greater_equal(place, 0), op.less(place, self.num))
        rows = super().forward(op.where(is_here, place, 0))
        return op.all_reduce(op.where(op.unsqueeze(is_here, -1), rows, 0.0), self.world)


class RankExperts(Module):
    """A rank's experts of all; ranks add up what theirs give."""

    first: Tensor
    world: int

    @staticmethod
    def of(whole: Experts | StackedExperts, rank: Parameter, world: int) -> RankExperts:
        """Return it for experts of any class, which says what is computed with them."""
        made = _as(RankExperts, whole, first=op.multiply(rank, whole.count // world), world=world)
        if isinstance(whole, Experts):  # stored one by one: each goes to one rank as it is
            for name in ("gate_up_weight", "down_weight"):
                setattr(made, name, op.shard(getattr(whole, name), rank, 0, world))
        else:
            for name, stack in whole.stacks.items():
                setattr(made, name, Parameter([whole.count // world, *stack.shape[1:]], stack.dtype))
        return made

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, size], the experts of each token [tokens, top_k] and their weights; to [tokens, size]."""
        return op.all_reduce(super().forward(x, op.subtract(experts, self.first), weights), self.world)


class RankRMSNorm(RMSNorm):
    """The norm over features of which a rank has a part: ranks add up the means of their squares. weight and bias [part of hidden_size]."""

    world: int

    def forward(self, x: Tensor) -> Tensor:
        """The shape stays."""
        weight = self.weight if self.factor is None else self.factor
        wide = op.multiply(_over_all(op.astype(x, "float32"), self.epsilon, self.world), weight)
        return op.astype(wide if self.bias is None else op.add(wide, self.bias), x.dtype)


class RankGatedRMSNorm(GatedRMSNorm):
    """As `RankRMSNorm`, with a gate. weight [part of size]."""

    world: int

    def normed(self, x: Tensor) -> Tensor:
        return op.multiply(_over_all(x, self.epsilon, self.world), self.weight)


def _over_all(x: Tensor, epsilon: float, world: int) -> Tensor:
    """x by the root of the mean square of all ranks' features."""
    mine = op.mean(op.square(x), -1, keepdims=True)
    all_ = op.multiply(op.all_reduce(mine, world), 1 / world)
    return op.multiply(x, op.rsqrt(op.add(all_, epsilon)))


class RankALiBi(ALiBi):
    """The slopes of a rank's heads."""

    def __init__(self, whole: ALiBi, rank: Parameter, world: int) -> None:
        self.slopes = op.shard(whole.slopes, rank, 0, world)


def divide(part: Module, whole: Module, world: int) -> tuple[Module, Plan]:
    """Return the model that each of `world` ranks computes, and what becomes of each weight.

    part: the model as it is built with what a rank has of heads, features and vocabulary; whole: as the checkpoint has it. Both are used up.
    Raises SpecError where this is not the same computation: for a layer norm over features that ranks divide, for sizes that do not divide.
    """
    if RANK in dict(whole.named_parameters()):
        raise SpecError(
            f"the model has a parameter {RANK!r}, which is the name of what says which rank a process is"
        )
    rank = Parameter([], "int64")
    dividing = _Dividing(dict(whole.named_modules()), rank, world)
    model = dividing.visit("", part)
    own = dict(vars(model))
    vars(model).clear()
    vars(model).update({RANK: rank, **own})  # the first under its name: formulas of others read it
    weights = {}
    stored = dict(whole.named_parameters())
    if missing := stored.keys() - dict(model.named_parameters()).keys():
        raise SpecError(
            f"{min(missing)} is in no rank's part of the model",
            details=[f"ranks would lack {len(missing)} weights"] if len(missing) > 1 else [],
            help="build the same modules for fewer heads: nnfront.divide compares them by their names",
        )
    for name, parameter in model.named_parameters():
        if parameter is not rank:
            weights[name] = dividing.planned(name, parameter, stored[name])
    return model, Plan(world, weights)


class _Dividing(Mutator):
    def __init__(self, whole: dict[str, Module], rank: Parameter, world: int) -> None:
        self.whole, self.rank, self.world = whole, rank, world
        self.styles: dict[str, Style] = {}

    def visit_module(self, name: str, node: Module) -> Any:
        whole = self.whole.get(name)
        assert whole is not None, f"{name} is in the part of a rank only"
        match node, whole:
            case ((Experts() | StackedExperts()), (Experts() | StackedExperts())):
                return self.experts(name, whole)
            case ALiBi(), ALiBi() if len(node.slopes) != len(whole.slopes):
                return RankALiBi(whole, self.rank, self.world)
            case RMSNorm(), RMSNorm() if _normalised(node) != _normalised(whole):
                return _as(RankRMSNorm, node, world=self.world)
            case GatedRMSNorm(), GatedRMSNorm() if whole.groups == 1 and _normalised(node) != _normalised(
                whole
            ):
                return _as(RankGatedRMSNorm, node, world=self.world)
            case Embedding(), Embedding() if node.num != whole.num:
                self.styles[name] = "vocabulary"
                return _as(RankEmbedding, node, first=op.multiply(self.rank, node.num), world=self.world)
            case Linear(), Linear() if node.in_features != whole.in_features:
                self.styles[name] = "row"
                return _as(RowLinear, node, world=self.world)
            case Linear(), Linear() if (
                node.out_features != whole.out_features and name.split(".")[-1] in HEADS
            ):
                self.styles[name] = "vocabulary"
                return _as(GatheredLinear, node, outputs=whole.out_features, world=self.world)
            case ((LayerNorm() | GroupNorm() | GatedRMSNorm()), _) if _normalised(node) != _normalised(whole):
                raise SpecError(
                    f"{name} normalises over features that ranks divide among them",
                    details=[
                        f"{_normalised(whole)} features together, of which a rank has {_normalised(node)}"
                    ],
                    help="this model cannot be divided like this: its norm needs all features of a token",
                )
        return super().visit_module(name, node)

    def experts(self, name: str, whole: Experts | StackedExperts) -> Module:
        if whole.count % self.world:
            raise SpecError(f"{name}: {whole.count} experts do not divide among {self.world} ranks")
        self.styles[name] = "expert"
        return RankExperts.of(whole, self.rank, self.world)

    def planned(self, name: str, part: Parameter, whole: Parameter) -> PlannedWeight:
        """What becomes of a weight, by what it is in both models."""

        def wrong(what: str, help: str = "") -> SpecError:
            got = f"a rank has {type_text(part.type)} of {type_text(whole.type)}"
            return SpecError(f"{name} {what}", details=[got], help=help)

        style = next((s for path, s in self.styles.items() if name.startswith(f"{path}.")), None)
        axes = [i for i, (a, b) in enumerate(zip(part.shape, whole.shape, strict=True)) if a != b]
        if not axes:
            return PlannedWeight("expert" if style == "expert" else "replicated", whole.type, part.type)
        if len(axes) > 1:
            raise wrong("is divided along several axes")
        if style is None and axes[0]:
            raise wrong(
                f"is divided along axis {axes[0]}, and nobody adds up what is multiplied with it",
                "use nnfront.Linear or nnfront.Experts, whose parts ranks know how to add up",
            )
        if style == "vocabulary":
            return PlannedWeight(style, whole.type, part.type, axes[0])
        sizes = [self.sizes(each, axes[0]) for each in (part, whole)]
        blocks = [(all, all // max(mine, 1)) for mine, all in zip(*sizes, strict=True)]
        if any(
            all != mine * parts or self.world % parts
            for (all, parts), mine in zip(blocks, sizes[0], strict=True)
        ):
            raise wrong(f"does not divide among {self.world} ranks")
        is_even = [parts for _, parts in blocks] == [self.world]
        if style == "row" and not is_even:
            raise wrong(
                "takes features of which several ranks have the same, and they would be added up more than once",
                f"let a rank have one of {self.world} parts of them",
            )
        return PlannedWeight(
            style or "column", whole.type, part.type, axes[0], None if is_even else tuple(blocks)
        )

    def sizes(self, parameter: Parameter, axis: int) -> list[int]:
        """What a parameter holds one after the other along an axis."""
        size = parameter.shape[axis]
        assert isinstance(size, int), "sizes of checkpoints are numbers"
        return list(parameter.attrs.get(JOINED, (size,))) if axis == 0 else [size]


def _normalised(norm: Any) -> int:
    """How many features with weights of their own a norm takes together."""
    features = 0 if norm.weight is None else int(norm.weight.shape[-1])
    return features // getattr(norm, "groups", 1)
