# SPDX-License-Identifier: Apache-2.0
"""Sampling keeps the tokens that transformers' logits processors keep, and refuses parameters out of range."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nnfront.errors import RunError
from nnfront.llm.sampling import Sampler, Sampling, tokens_of


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 1.0, "top_p": 1e-6},
    ],
    ids=str,
)
def test_the_distribution_is_that_of_transformers(options: dict[str, Any]) -> None:
    logits = torch.randn(4, 64) * 2
    scores = TemperatureLogitsWarper(options["temperature"])(None, logits)
    if "top_k" in options:
        scores = TopKLogitsWarper(options["top_k"])(None, scores)
    if "top_p" in options:
        scores = TopPLogitsWarper(options["top_p"])(None, scores)
    if "min_p" in options:
        scores = MinPLogitsWarper(options["min_p"])(None, scores)
    got = Sampler(Sampling(**options)).probabilities(logits)
    torch.testing.assert_close(got, scores.softmax(-1), rtol=1e-5, atol=1e-7)


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = torch.randn(3, 50)
    assert Sampler(Sampling())(logits).tolist() == logits.argmax(-1).tolist()


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    draws = Sampler(Sampling(temperature=1.0, seed=1))(logits.expand(20000, 4))
    frequencies = torch.bincount(draws, minlength=4) / len(draws)
    torch.testing.assert_close(frequencies, logits.softmax(-1)[0], rtol=0, atol=0.015)


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others() -> None:
    logits = torch.randn(1, 1000).expand(16, 1000)
    draw = lambda seed: Sampler(Sampling(temperature=1.0, seed=seed))(logits).tolist()  # noqa: E731
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


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
        scores = theirs(prompts, logits)
        token = sampler(logits)
        assert token.tolist() == scores.argmax(-1).tolist()
        prompts = torch.cat([prompts, token[:, None]], 1)
        assert torch.equal(sampler.scores(logits), theirs(prompts, logits))


def test_the_penalty_comes_before_everything_else() -> None:
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02}
    sampler = Sampler(Sampling(**options, repetition_penalty=1.5), prompts)
    logits = torch.randn(2, 40) * 2
    sampler(logits)
    expected = Sampler(Sampling(**options)).probabilities(sampler.scores(logits))
    torch.testing.assert_close(sampler.probabilities(logits), expected, rtol=0, atol=0)


def test_a_penalty_without_the_prompts_is_an_error() -> None:
    sampler = Sampler(Sampling(repetition_penalty=1.5), [torch.tensor([1])])
    with pytest.raises(RunError, match=r"(?s)counts the prompts' tokens.*for 2 sequences, and 1 prompts"):
        sampler(torch.randn(2, 8))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_logits_that_leave_no_token_to_draw_are_an_error(value: float) -> None:
    logits = torch.full((1, 4), -math.inf)
    logits[0, 1] = value
    with pytest.raises(RunError, match="no token to draw: the largest is infinite"):
        Sampler(Sampling(temperature=1.0))(logits)
    assert Sampler(Sampling())(logits).tolist() == [1 if value > 0 else 0]


def test_of_equal_tokens_the_first_are_kept() -> None:
    kept = Sampler(Sampling(temperature=1.0, top_p=0.3505)).probabilities(torch.zeros(1, 1000))[0] > 0
    assert kept.nonzero()[:, 0].tolist() == list(range(351))


def test_numbers_of_tokens_are_told_and_a_missing_one_is_an_error() -> None:
    assert tokens_of(torch.tensor([3, 0])) == [3, 0]
    with pytest.raises(RunError, match="logits hold NaN, or no token to draw"):
        tokens_of(torch.tensor([3, -1]))
