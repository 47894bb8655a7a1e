# SPDX-License-Identifier: Apache-2.0
"""Experts that a checkpoint stores one by one, and how they are chosen, against loops over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nnfront as nn
from nnfront.errors import SpecError


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_experts_have_the_checkpoints_names_and_are_multiplied_as_stacks(names: tuple[str, str, str]) -> None:
    experts = nn.Experts(3, 4, 6, "relu2", names)
    found = [name for name, _ in experts.named_parameters()]
    assert found == [f"{i}.{name}.weight" for i in range(3) for name in names]
    values = {name: torch.randn(p.shape) for name, p in experts.named_parameters()}
    experts.load_state_dict(values)
    x, chosen, weights = torch.randn(5, 4), torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    expected = torch.zeros(5, 4)
    for token in range(5):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up, down = (values[f"{expert}.{name}.weight"] for name in names)
            expected[token] += weight * (down @ ((gate @ x[token]).relu() ** 2 * (up @ x[token])))
    torch.testing.assert_close(experts(x, chosen, weights), expected)


def chosen_one_by_one(
    scores: torch.Tensor, count: int, bias: torch.Tensor, groups: tuple[int, int, int] | None
) -> list[list[int]]:
    """The experts of each token by sorting, the best first."""
    found = []
    for row in (scores + bias).tolist():
        allowed = set(range(len(row)))
        if groups is not None:
            number, kept, best = groups
            size = len(row) // number
            worth = [sum(sorted(row[i * size : (i + 1) * size])[-best:]) for i in range(number)]
            good = sorted(range(number), key=lambda i: -worth[i])[:kept]
            allowed = {i for i in allowed if i // size in good}
        found.append(sorted(allowed, key=lambda i: -row[i])[:count])
    return found


@pytest.mark.parametrize("groups", [None, (4, 2, 2), (2, 1, 1), (3, 3, 4)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"normalized": True, "epsilon": 0.25, "scale": 2.5}], ids=str)
def test_the_best_experts_of_the_best_groups_are_chosen_by_corrected_scores(
    groups: Any, with_bias: bool, options: dict[str, Any]
) -> None:
    scores, bias = torch.rand(40, 12), torch.randn(12) if with_bias else torch.zeros(12)
    experts, weights = nn.eager(
        lambda s, b: nn.top_experts(s, 3, bias=b if with_bias else None, groups=groups, **options),
        scores,
        bias,
    )
    expected = chosen_one_by_one(scores, 3, bias, groups)
    assert experts.tolist() == expected
    plain = scores.gather(1, torch.tensor(expected))
    if options:
        plain = plain / (plain.sum(1, keepdim=True) + 0.25) * 2.5
    torch.testing.assert_close(weights, plain)


@pytest.mark.parametrize("groups", [(5, 2, 1), (4, 5, 1), (4, 1, 1), (6, 6, 3)], ids=str)
def test_groups_that_cannot_hold_the_chosen_experts_are_refused(groups: tuple[int, int, int]) -> None:
    number, kept, _ = groups
    with pytest.raises(SpecError, match=f"4 of 12 experts cannot be chosen from {kept} of {number} groups"):
        nn.eager(lambda s: nn.top_experts(s, 4, groups=groups), torch.rand(2, 12))
