# SPDX-License-Identifier: Apache-2.0
"""The largest of a row, the fewest that reach a part, draws and masks: against a sort of the whole row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnfront.engine import likely
from nnfront.engine.draw import Draw
from nnfront.engine.likely import drawn, largest, nucleus, weights
from nnfront.engine.params import Params


def row(seed: int, size: int, kinds: int | None = None, missing: float = 0.0) -> likely.Row:
    """Scores, some of them equal if there are few kinds, some missing."""
    random = np.random.default_rng(seed)
    made = random.normal(0, 3, size) if kinds is None else random.integers(0, kinds, size)
    made = made.astype(np.float32)
    made[random.random(size) < missing] = -np.inf
    made[random.integers(size)] = 1.0
    return made


ROWS = st.builds(
    row,
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 63, 64, 65, 700, 5000, 20000]),
    st.none() | st.integers(1, 40),
    st.sampled_from([0.0, 0.5, 0.99]),
)


@settings(max_examples=80)
@given(ROWS, st.integers(1, 300))
def test_the_largest_are_those_of_a_sort_with_all_that_equal_the_last(scores: likely.Row, count: int) -> None:
    ordered = np.sort(scores)[::-1]
    least = ordered[min(count, len(scores)) - 1]
    expected = [i for i, score in enumerate(scores) if score >= least and score > -np.inf]
    assert largest(scores, count).tolist() == expected


@settings(max_examples=80)
@given(ROWS, st.floats(0.01, 0.999), st.sampled_from([0.3, 1.0, 5.0]))
def test_the_fewest_that_reach_a_part_are_those_of_a_sort(
    scores: likely.Row, part: float, temperature: float
) -> None:
    made = weights(scores, temperature)
    order = np.argsort(-made, kind="stable")
    sums = made[order].astype(np.float64).cumsum()
    found = nucleus(made, part)
    count = len(found)
    assert found.tolist() == order[:count].tolist()
    # The last of them is wanted, and no other: as far as sums in float32 can say.
    assert sums[count - 1] >= (part - 1e-5) * sums[-1]
    assert count == 1 or sums[count - 2] <= (part + 1e-5) * sums[-1]


@settings(max_examples=80)
@given(ROWS, st.floats(0, 1, exclude_max=True))
def test_a_draw_is_where_the_sum_of_all_before_passes_the_number(scores: likely.Row, number: float) -> None:
    made = weights(scores, 1.0)
    at = drawn(made, number)
    sums = made.astype(np.float64).cumsum()
    assert made[at] > 0
    assert sums[at] >= (number - 1e-5) * sums[-1]
    assert sums[at] - made[at] <= (number + 1e-5) * sums[-1]


def test_every_place_is_drawn_and_none_without_weight() -> None:
    made = np.zeros(2000, np.float32)
    made[[3, 255, 256, 257, 1999]] = 1
    numbers = np.linspace(0, 1, 5000, endpoint=False)
    assert {drawn(made, float(number)) for number in numbers} == {3, 255, 256, 257, 1999}


@pytest.mark.parametrize("temperature", [5e-324, 1e-20, 1e-3])
def test_next_to_no_temperature_is_greedy(temperature: float) -> None:
    scores = row(1, 3000)
    for options in ({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}):
        params = Params(temperature=temperature, seed=1, **options)  # type: ignore[arg-type]
        assert Draw(params, [])(scores) == scores.argmax()


@pytest.mark.parametrize("bits", [0, 8, 9, 96, 200])
def test_a_mask_takes_out_what_has_no_bit(bits: int) -> None:
    allowed = np.random.default_rng(bits).random(bits) < 0.5
    allowed[:1] = True

    class Masked:
        is_over = False

        def allowed(self, vocab: int) -> np.ndarray:
            return np.packbits(allowed, bitorder="little")

    scores = row(2, 100)
    found = Draw(Params(grammar=Masked()), [])._scores(scores)  # type: ignore[arg-type]
    whole = np.zeros(100, bool)
    whole[: min(bits, 100)] = allowed[:100]
    assert np.array_equal(found, np.where(whole, scores, -np.inf))


@pytest.mark.parametrize(
    "options", [{"top_k": 20}, {"top_p": 0.95}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9}]
)
def test_a_vocabulary_is_not_sorted(options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    scores = row(1, 150_000)
    scores[77] = 30.0  # a model knows more of what comes than chance does
    scores[:300] += 14.0
    sizes = []
    for name in ("argsort", "partition", "sort", "argpartition"):
        original = getattr(np, name)

        def counted(array: np.ndarray, *args: object, original: object = original, **more: object) -> object:
            sizes.append(len(array))
            return original(array, *args, **more)  # type: ignore[operator]

        monkeypatch.setattr(np, name, counted)
    draw = Draw(Params(temperature=0.8, seed=1, logprobs=5, **options), [])  # type: ignore[arg-type]
    token = draw(scores)
    draw.logprobs(scores, token)
    assert sizes
    assert max(sizes) < 5000
