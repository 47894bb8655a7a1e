# SPDX-License-Identifier: Apache-2.0
"""Several sequences draw together as each would alone, with transformers' penalty; parameters out of range are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from nnfront.engine.params import Sampling
from nnfront.errors import RunError
from nnfront.llm.sampling import Sampler, tokens_of


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = torch.randn(3, 50)
    assert Sampler(Sampling())(logits).tolist() == logits.argmax(-1).tolist()


def test_the_same_seed_draws_the_same_tokens_whatever_other_rows_there_are_and_another_seed_others() -> None:
    rows = torch.randn(16, 1, 1000)

    def drawn(seed: int, beside: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [int(sampler(row.expand(beside + 1, 1000))[beside]) for row in rows]

    assert drawn(3, 0) == drawn(3, 2)
    assert drawn(3, 0) != drawn(4, 0)


def test_without_a_seed_rows_draw_different_tokens() -> None:
    tokens = Sampler(Sampling(temperature=1.0))(torch.zeros(8, 10**6))
    assert len({*tokens.tolist()}) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": math.nan}, "temperature is nan, expected a number >= 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": 0}, "top_k is 0, expected an int >= 1"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": math.nan}, r"top_p is nan, expected a number in \(0, 1\]"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, r"min_p is -0.1, expected a number in \[0, 1\]"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"seed": 1.5}, "seed is 1.5, expected an int"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, expected a number > 0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
    ],
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        Sampling(**options)


def test_all_parameters_out_of_range_are_named_at_once() -> None:
    with pytest.raises(RunError, match=r"(?s)temperature is nan.*top_k is 0.*top_p is 2"):
        Sampling(temperature=math.nan, top_k=0, top_p=2)


def test_nan_logits_are_an_error_and_no_token() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 2] = math.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(RunError, match="logits hold NaN"):
            Sampler(Sampling(temperature=temperature))(logits)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    prompts = torch.randint(0, 32, (3, 9))
    sampler = Sampler(Sampling(repetition_penalty=penalty), list(prompts))
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    for _ in range(5):
        logits = torch.randn(3, 32) * 2
        token = sampler(logits)
        assert token.tolist() == theirs(prompts, logits).argmax(-1).tolist()
        prompts = torch.cat([prompts, token[:, None]], 1)


def test_a_penalty_without_the_prompts_is_an_error() -> None:
    sampler = Sampler(Sampling(repetition_penalty=1.5), [torch.tensor([1])])
    with pytest.raises(RunError, match=r"(?s)counts the prompts' tokens.*for 2 sequences, and 1 prompts"):
        sampler(torch.randn(2, 8))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_logits_that_leave_no_token_to_draw_are_an_error(value: float) -> None:
    logits = torch.full((1, 4), -math.inf)
    logits[0, 1] = value
    for temperature in (0.0, 1.0):
        with pytest.raises(RunError, match="no token to draw"):
            Sampler(Sampling(temperature=temperature))(logits)


def test_numbers_of_tokens_are_told_and_a_missing_one_is_an_error() -> None:
    assert tokens_of(torch.tensor([3, 0])) == [3, 0]
    with pytest.raises(RunError, match="logits hold NaN, or no token to draw"):
        tokens_of(torch.tensor([3, -1]))
