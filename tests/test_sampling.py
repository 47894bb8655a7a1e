# SPDX-License-Identifier: Apache-2.0
"""Sampling keeps the tokens that transformers' logits processors keep, and refuses parameters out of range."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nnfront.errors import RunError
from nnfront.sampling import Sampler, Sampling


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
