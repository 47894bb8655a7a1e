# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: feed-forward layers that a checkpoint stores one by one and a model multiplies as stacks, and how a router chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nnfront.errors import SpecError
from nnfront.nn.functional import op
from nnfront.nn.layers import Linear
from nnfront.nn.mode import names_place
from nnfront.nn.module import Container, Module
from nnfront.nn.parameter import Parameter
from nnfront.nn.tensor import Tensor

EXPERT_ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""What experts may have between their products: names of config.json's `hidden_act`, and what `op.moe_mlp` calls them."""

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


class _Expert(Module):
    """The matrices of one expert, under the names that a checkpoint has for them."""

    def __init__(self, size: int, inner: int, names: tuple[str, str, str]) -> None:
        gate, up, down = (
            Linear(*sizes, bias=False) for sizes in ((size, inner), (size, inner), (inner, size))
        )
        vars(self).update(zip(names, (gate, up, down), strict=True))
        self.gate_up_weight = op.concat([gate.weight, up.weight], 0)


class Experts(Container):
    """down(activation(gate(x)) * up(x)) of the experts that were chosen for each token, times their weights, summed (`op.moe_mlp`).

    They are called by number in the checkpoint, and their matrices by `names`: "0.gate_proj.weight", and so on.
    """

    def __init__(
        self,
        count: int,
        size: int,
        inner: int,
        activation: str = "silu",
        names: tuple[str, str, str] = GATE_UP_DOWN,
    ) -> None:
        """`activation`: a name in `nnfront.EXPERT_ACTIVATIONS`."""
        self.data = [_Expert(size, inner, names) for _ in range(count)]
        self.activation = EXPERT_ACTIVATIONS[activation]
        self.gate_up_weight = op.stack([each.gate_up_weight for each in self.data], 0)
        self.down_weight = op.stack([getattr(each, names[2]).weight for each in self.data], 0)

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self.data)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, size], the experts of each token [tokens, top_k] and their weights; to [tokens, size]."""
        return op.moe_mlp(
            x, self.gate_up_weight, self.down_weight, experts, weights, activation=self.activation
        )


class StackedExperts(Module):
    """Experts whose matrices a checkpoint has as stacks: the first axis of each of the module's own parameters counts experts.

    `forward` takes what that of `Experts` does; ranks that divide a model cut the stacks between experts.
    """

    @property
    def stacks(self) -> dict[str, Parameter]:
        """The parameters by name."""
        return {name: each for name, each in vars(self).items() if isinstance(each, Parameter)}

    @property
    def count(self) -> int:
        """How many experts there are."""
        return int(next(iter(self.stacks.values())).shape[0])

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, size], the experts of each token [tokens, top_k] and their weights; to [tokens, size]."""
        raise NotImplementedError


@names_place
def top_experts(
    scores: Tensor,
    count: int,
    *,
    bias: Tensor | None = None,
    groups: tuple[int, int, int] | None = None,
    normalized: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose `count` experts for each token by their scores: float [tokens, experts] to (experts, weights), both [tokens, count].

    bias [experts] is added where experts are compared, not in their weights. groups (n, kept, best): the experts lie in n groups, and only those of the `kept`
    groups can be chosen whose `best` highest scores have the highest sum. normalized: a token's weights, which are scores, are divided by their sum (plus `epsilon`).
    scale: what the weights are multiplied with at the end.
    Raises SpecError for groups that the experts do not divide into, or that cannot hold `count` experts.
    """
    total, ranked = scores.shape[-1], scores if bias is None else op.add(scores, bias)
    if groups is not None:
        number, kept, best = groups
        if total % number or kept > number or count > kept * (total // number) or best > total // number:
            raise SpecError(
                f"nnfront.top_experts: {count} of {total} experts cannot be chosen from {kept} of {number} groups"
            )
        by_group = op.reshape(ranked, (ranked.shape[0], number, total // number))
        of_group = op.sum(op.topk(by_group, best, ret_type="values"), -1)
        chosen = op.topk(of_group, kept, ret_type="indices")
        is_kept = op.any(op.unsqueeze(chosen, -1) == op.arange(number), 1)
        by_group = op.where(op.unsqueeze(is_kept, -1), by_group, float("-inf"))
        ranked = op.reshape(by_group, (ranked.shape[0], total))
    values, experts = op.topk(ranked, count)
    weights = values if ranked is scores else op.gather(scores, experts, -1)
    if normalized:
        weights = weights / (op.sum(weights, -1, keepdims=True) + epsilon)
    return experts, weights if scale == 1 else weights * scale


class Router(Module):
    """Scores of all experts, of which `top_experts` chooses `chosen` for each token: a softmax over them, or sigmoids that a learned bias corrects where they are compared.

    Checkpoint names: weight, and e_score_correction_bias where there is one. wide: products are float32 before they are rounded. The rest is as for `top_experts`.
    """

    def __init__(
        self,
        size: int,
        count: int,
        chosen: int,
        *,
        corrected_sigmoids: bool = False,
        wide: bool = False,
        groups: tuple[int, int, int] | None = None,
        normalized: bool = False,
        scale: float = 1.0,
    ) -> None:
        self.weight = Parameter([count, size])
        self.e_score_correction_bias = Parameter([count], "float32") if corrected_sigmoids else None
        self.scores: Callable[[Tensor], Tensor] = op.sigmoid if corrected_sigmoids else op.softmax
        self.epsilon = 1e-20 if corrected_sigmoids else 0.0
        self.chosen, self.wide, self.groups = chosen, wide, groups
        self.normalized, self.scale = normalized, scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, size] to the experts of each token and their weights, both [tokens, chosen]."""
        products = op.linear(x, self.weight, out_dtype="float32") if self.wide else op.linear(x, self.weight)
        return top_experts(
            self.scores(op.astype(products, "float32")),
            self.chosen,
            bias=self.e_score_correction_bias,
            groups=self.groups,
            normalized=self.normalized,
            epsilon=self.epsilon,
            scale=self.scale,
        )


class MixtureOfExperts(Module):
    """Experts of which `gate` chooses some for each token, and `shared_experts`, if there are any, of all tokens."""

    def __init__(self, gate: Module, experts: Module, shared_experts: Module | None = None) -> None:
        """`gate` gives experts and weights, as `Router` does; `experts` takes both, as `Experts` does."""
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, size] to the same."""
        tokens = op.reshape(x, (-1, x.shape[-1]))
        y: Tensor = op.reshape(self.experts(tokens, *self.gate(tokens)), x.shape)
        return y if self.shared_experts is None else y + self.shared_experts(x)
