# SPDX-License-Identifier: Apache-2.0
"""The draw of one row: the distribution is that of transformers' logits processors, and the numbers come as often as it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nnfront.engine.draw import Draw
from nnfront.engine.params import Params
from nnfront.errors import RunError

VOCAB = 60


def logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.floats(0.2, 3),
    st.none() | st.integers(1, 70),
    st.none() | st.floats(0.05, 1),
    st.none() | st.floats(0, 1),
    st.sampled_from([1.0, 1.3, 0.8]),
)
def test_the_distribution_is_that_of_transformers(
    seed: int, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, penalty: float
) -> None:
    row, prompt = logits(seed), [1, 5, 7]
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": penalty,
    }
    theirs = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)]
    theirs += [TopKLogitsWarper(top_k)] if top_k is not None else []
    theirs += [TopPLogitsWarper(top_p)] if top_p is not None else []
    theirs += [MinPLogitsWarper(min_p)] if min_p is not None else []
    scores = torch.from_numpy(row)[None]
    for each in theirs:
        scores = each(torch.tensor([prompt]), scores)
    expected = scores.softmax(-1)[0].numpy()
    tokens, likely = Draw(Params(**sampling), prompt).probabilities(row)  # type: ignore[arg-type]
    found = np.zeros(VOCAB)
    found[tokens] = likely
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_of_equal_tokens_the_first_are_kept() -> None:
    tokens, _ = Draw(Params(temperature=1.0, top_p=0.3505), []).probabilities(np.zeros(1000, np.float32))
    assert sorted(tokens) == list(range(351))


def test_tokens_come_as_often_as_they_are_likely() -> None:
    row, count = logits(3), 4000
    params = Params(temperature=1.0)
    tokens, likely = Draw(params, []).probabilities(row)
    drawn = np.bincount(
        [Draw(Params(temperature=1.0, seed=i), [])(row) for i in range(count)], minlength=VOCAB
    )
    expected = np.zeros(VOCAB)
    expected[tokens] = likely * count
    often = expected > 5
    chi = ((drawn - expected)[often] ** 2 / expected[often]).sum()
    assert chi < often.sum() + 4 * np.sqrt(2 * often.sum())


def test_a_draw_depends_on_the_seed_and_its_place_alone() -> None:
    rows = [logits(i) for i in range(30)]
    first = Draw(Params(temperature=2.0, seed=-4), [])
    tokens = [first(row) for row in rows]
    assert [Draw(Params(temperature=2.0, seed=-4), [])(rows[0]) for _ in range(3)] == [tokens[0]] * 3
    again = Draw(Params(temperature=2.0, seed=-4), [])
    again.drawn = 17
    assert again(rows[17]) == tokens[17]
    assert [Draw(Params(temperature=2.0, seed=i), [])(rows[0]) for i in range(9)] != [tokens[0]] * 9


def test_penalties_and_bias_change_logits_as_their_definitions_say() -> None:
    row = np.zeros(6, np.float32)
    draw = Draw(Params(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={4: 1.5}), [0])
    draw._counts.update([2, 2, 3])
    np.testing.assert_allclose(draw._scores(row), [0, 0, -1.0, -0.75, 1.5, 0])
    assert not row.any()


def test_no_end_comes_before_its_time() -> None:
    row = np.array([9, 5, 1, 0], np.float32)
    draw = Draw(Params(min_tokens=2, stop_tokens=(1,)), [], [0])
    assert [draw(row) for _ in range(3)] == [2, 2, 0]


def test_log_probabilities_are_those_of_the_models_logits() -> None:
    row = logits(1)
    draw = Draw(Params(temperature=0.5, logprobs=3), [])
    expected = torch.from_numpy(row).double().log_softmax(-1)
    found = draw.logprobs(row, 11)
    assert found is not None
    assert found.token == pytest.approx(expected[11].item())
    best = expected.topk(3)
    assert [token for token, _ in found.top] == best.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values.tolist())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_without_a_token_to_draw_are_an_error(bad: float) -> None:
    row = logits(0)
    row[3] = bad
    with pytest.raises(RunError, match="the model's logits hold NaN, or no token to draw"):
        Draw(Params(), [])(row)


def test_parameters_out_of_range_are_listed() -> None:
    with pytest.raises(RunError, match="the sampling parameters are out of range") as error:
        Params(top_k=0, max_tokens=0, min_tokens=-1, presence_penalty=3.0, logit_bias={1: 200.0}, logprobs=21)
    assert error.value.details == (
        "top_k is 0, expected an int >= 1",
        "max_tokens is 0, expected an int >= 1",
        "min_tokens is -1, expected an int >= 0",
        "presence_penalty is 3.0, expected a number in [-2, 2]",
        "logit_bias has a value that is no number in [-100, 100]",
        "logprobs is 21, expected an int in [0, 20]",
    )
