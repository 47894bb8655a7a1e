# SPDX-License-Identifier: Apache-2.0
"""Tokens that are guessed: a text is the same with and without guesses, whatever they are, alone and in company; and they save calls where they are right."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from answering import Answer, asked_together
from few_of import few_of
from serving import FOLDER, LIMITS

import nnfront as nn
from nnfront.backends.cpu.extension import NATIVE
from nnfront.engine.params import Params
from nnfront.engine.speculate import MOST_GUESSED, Clock, NGrams, Pay, guesser_of
from nnfront.errors import RunError
from nnfront.serve.engine import Engine
from nnfront.serve.grammar import Grammars, choice

pytestmark = pytest.mark.skipif(NATIVE is None, reason="products of few rows are the extension's")
REPEATING = "def first(self):\n    return self.items[0]\n\ndef first(self):\n    return self.items[0]\n\ndef first(self):\n"


@pytest.fixture(scope="module")
def extending() -> nn.LLM:
    return nn.LLM.load(FOLDER, extends=True)


class Oracle:
    """Guesses what is going to come, some of it wrong."""

    def __init__(self, text: list[int], wrong: float, seed: int) -> None:
        self.text, self.wrong, self.random = text, wrong, random.Random(seed)

    def guess(self, tokens: list[int], most: int) -> list[int]:
        come = self.text[len(tokens) : len(tokens) + self.random.randint(0, most)]
        return [5 if self.random.random() < self.wrong else token for token in come]


def requests(text: list[int], count: int) -> list[tuple[list[int], Params]]:
    random_ = random.Random(3)
    found = []
    for i in range(count):
        at = random_.randrange(len(text) - 300)
        params = Params(
            temperature=random_.choice([0.0, 0.7, 1.2]),
            top_p=random_.choice([None, 0.9]),
            seed=i,
            max_tokens=random_.randint(1, 40),
            repetition_penalty=random_.choice([1.0, 1.1]),
            ignore_eos=True,
        )
        found.append((text[at : at + random_.randint(1, 90)], params))
    return found


@pytest.mark.parametrize(
    ("wrong", "pages"), few_of([(0.3, 32), (0.0, 160), (0.3, 160), (0.0, 32), (1.0, 32), (1.0, 160)])
)
def test_texts_are_the_same_whatever_is_guessed(
    extending: nn.LLM, text: list[int], wrong: float, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = requests(text, 14)
    with Engine(extending, replace(LIMITS, remembers=False)) as engine:
        expected = [Answer(engine, prompt, params).wait() for prompt, params in wanted]
    whole = {
        tuple(prompt): prompt + tokens for (prompt, _), (tokens, _) in zip(wanted, expected, strict=True)
    }

    class Guesser:
        def guess(self, tokens: list[int], most: int) -> list[int]:
            known = next(full for start, full in whole.items() if tuple(tokens[: len(start)]) == start)
            return Oracle(known, wrong, len(tokens)).guess(tokens, most)

    monkeypatch.setattr(nn.LLM, "guesser", lambda self, how, longest: Guesser())
    monkeypatch.setattr(Pay, "is_due", lambda self, cost: True)
    with Engine(extending, replace(LIMITS, pages=pages), spec="ngram") as engine:
        answers = asked_together(engine, wanted)
        assert [answer.wait() for answer in answers] == expected
        counts = engine.counts()
        assert counts["drafted"] > 0
        assert (counts["accepted"] > 0) or wrong == 1.0
        engine.forget()
        Answer(engine, text[:5], Params(max_tokens=1)).wait()
    assert engine._scheduler.pages.free == pages


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_generate_is_the_same_with_guesses(extending: nn.LLM, temperature: float) -> None:
    prompts = [REPEATING, "import os\n", "class A:\n    def __init__(self):\n"]
    options = {"max_new_tokens": 60, "temperature": temperature, "seed": 4}
    expected = extending.generate(prompts, **options)
    assert extending.generate(prompts, **options, spec="ngram") == expected
    assert extending.generate(prompts[0], **options, spec="ngram:2") == expected[0]


def test_a_draft_model_guesses_and_the_text_stays(extending: nn.LLM, text: list[int]) -> None:
    wanted = requests(text, 5)
    with Engine(extending, replace(LIMITS, remembers=False)) as engine:
        expected = [Answer(engine, prompt, params).wait() for prompt, params in wanted]
    with Engine(extending, LIMITS, spec=f"draft:{FOLDER}") as engine:
        answers = asked_together(engine, wanted)
        assert [answer.wait() for answer in answers] == expected
        assert engine.counts()["accepted"] > 20  # it is the model itself
    draft = extending.guesser(f"draft:{FOLDER}", 100)
    greedy = extending.generate_ids([torch.tensor(text[:20])], 12)[0].tolist()
    assert draft.guess(text[:20], 5) == greedy[:5]
    assert draft.guess([*text[:20], *greedy[:3]], 4) == greedy[3:7]  # of what it knows
    assert draft.guess([*text[:20], *greedy[:3], 5], 4) != greedy[4:8]
    assert draft.guess([*text[:20], *greedy[:3], 5, *text[:70]], 9) != []
    assert draft.guess([*text[:20], *greedy[:3], 5, *text[:80]], 9) == []  # there is no more room


def test_what_a_grammar_forces_is_computed_together(extending: nn.LLM) -> None:
    grammars = Grammars(extending.tokenizer, extending.config.vocab_size, extending.eos_token_ids)
    matcher = grammars.compiled(choice(["a long text that has to come as it is", "b is another one"]))
    prompt = extending.tokenizer.encode("def main():\n")

    def answer(llm: nn.LLM) -> tuple[tuple[list[int], str], float]:
        with Engine(llm, LIMITS) as engine:
            came = Answer(engine, prompt, Params(max_tokens=40, grammar=matcher())).wait()
            return came, engine.counts()["accepted"]

    (expected, _), (got, accepted) = answer(nn.LLM.load(FOLDER)), answer(extending)
    assert got == expected
    assert accepted > 0


def test_the_bits_of_several_tokens_are_those_of_one_after_the_other(
    extending: nn.LLM, text: list[int]
) -> None:
    session = extending.session
    for stored_as in (None, "float8_e4m3fn"):
        one, many = (
            session.make_cache(batch=2, max_seq=256, page_size=16, stored_as=stored_as) for _ in range(2)
        )
        for cache in (one, many):
            for row, length in enumerate((70, 33)):
                session["prefill"](torch.tensor([text[row : row + length]]), cache.rows(row))
        ids = torch.tensor([text[100:108], text[200:208]])
        singles = [session["decode"](ids[:, i : i + 1], one) for i in range(8)]
        assert torch.equal(session["extend"](ids, many), torch.cat(singles, 1))


def test_ngrams_say_what_came_before() -> None:
    assert NGrams(3).guess([1, 2, 3, 4, 5, 1, 2, 3], 3) == [4, 5, 1]
    assert NGrams(3).guess([1, 2, 3, 9, 2, 3, 4, 2, 3], 2) == [4, 2]  # the last place before
    assert NGrams(3).guess([1, 2, 3, 4], 3) == []
    assert NGrams(1).guess([7, 8, 7], 2) == [8, 7]
    growing, tokens = NGrams(2), [1, 2]
    for token in (3, 1, 2):
        tokens.append(token)
        found = growing.guess(tokens, MOST_GUESSED)
    assert found == [3, 1, 2]
    brute = random.Random(0)
    tokens, kept = [], NGrams(3)
    for _ in range(300):
        tokens.append(brute.randrange(4))
        expected: list[int] = []
        for size in (3, 2):
            ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tokens[-size:]]
            if ends and len(tokens) >= size:
                expected = tokens[ends[-1] :][:5]
                break
        assert kept.guess(tokens, 5) == expected


def test_guesses_that_do_not_pay_are_not_made() -> None:
    pay = Pay()
    assert pay.is_due(1.5)
    for _ in range(12):
        pay.took(1)
    due = [pay.is_due(1.5) for _ in range(60)]
    assert 0 < sum(due) < 20
    assert not any(due[:40])


def test_calls_that_are_held_up_do_not_make_guesses_look_dear() -> None:
    clock = Clock()
    for seconds in (0.5, 0.01, 0.2, 0.01):
        clock.took(seconds, False)
    assert clock.cost == 1
    for seconds in (0.4, 0.9, 0.016):
        clock.took(seconds, True)
    assert clock.cost < 1.5
    for _ in range(6):
        clock.took(0.016, True)
    assert clock.cost == pytest.approx(1.6)
    for _ in range(30):  # texts get longer, and calls with them
        clock.took(0.03, False)
        clock.took(0.036, True)
    assert clock.cost == pytest.approx(1.2)


@pytest.mark.parametrize("how", ["", "ngrams", "ngram:0", "ngram:x", "ngram:99"])
def test_another_way_to_guess_is_refused(how: str) -> None:
    with pytest.raises(RunError, match=rf"^there is no way '{how}' to guess tokens\n  help: ngram, ngram:N"):
        guesser_of(how)


def test_without_the_method_guesses_are_refused(llm: nn.LLM) -> None:
    with pytest.raises(
        RunError,
        match=r"^tokens cannot be guessed: the model has no method 'extend', which computes several tokens of each sequence"
        r"\n  methods are 'logits', 'prefill', 'decode'\n  help: LLM.load\(DIR, extends=True\); an artefact without it is older, and is to be exported again$",
    ):
        llm.generate("import", max_new_tokens=2, spec="ngram")


def test_a_draft_with_other_tokens_is_refused(llm: nn.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(config=SimpleNamespace(vocab_size=7))
    monkeypatch.setattr(nn.LLM, "load", lambda *_: other)
    with pytest.raises(RunError, match=r"^small cannot draft: it has 7 tokens, the model 4096$"):
        llm.guesser("draft:small", 10)
