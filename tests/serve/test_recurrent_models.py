# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent states in the engine: tokens that were guessed wrong are taken back, prompts that begin alike go on from snapshots, and texts stay what they are."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import Answer, asked_together, held
from few_of import few_of
from model_folders import random_folder
from patience import HANGS_SECONDS
from serving import LIMITS

import nnfront as nn
from nnfront.backends.cpu.extension import NATIVE
from nnfront.engine.params import Params
from nnfront.engine.speculate import DraftModel, Pay
from nnfront.errors import RunError
from nnfront.serve.engine import Engine

TYPES = ["qwen3_next", "mamba2", "lfm2", "falcon_h1"]
needs_native = pytest.mark.skipif(NATIVE is None, reason="products of few rows are the extension's")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def load(model_type: str) -> nn.LLM:
        path: Path = random_folder(tmp_path_factory.mktemp("models") / model_type, model_type)
        return nn.LLM.load(path, extends=True)

    return load


@needs_native
@pytest.mark.parametrize("model_type", few_of([*TYPES, "mamba", "kimi_linear"], 3))
def test_the_bits_of_several_tokens_are_those_of_one_after_the_other(loaded: Any, model_type: str) -> None:
    session = loaded(model_type).session
    ids = torch.randint(0, 90, (2, 48), generator=torch.Generator().manual_seed(1))
    one, many = (session.make_cache(batch=2, max_seq=64, page_size=8) for _ in range(2))
    for made in (one, many):
        for row, length in enumerate((17, 33)):
            session["prefill"](ids[row : row + 1, :length], made.rows(row))
    for first, count in ((34, 3), (37, 8)):
        singles = [session["decode"](ids[:, first + i : first + i + 1], one) for i in range(count)]
        assert torch.equal(session["extend"](ids[:, first : first + count], many), torch.cat(singles, 1))
    for a, b in zip(one.states().buffers, many.states().buffers, strict=True):
        assert torch.equal(a, b)


def requests(seed: int, count: int) -> list[tuple[list[int], Params]]:
    """Prompts of which several begin alike, by whole chunks and more."""
    random_ = random.Random(seed)
    starts = [[random_.randrange(90) for _ in range(n)] for n in (32, 70, 110)]
    found = []
    for i in range(count):
        prompt = [
            *random_.choice([*starts, []]),
            *(random_.randrange(90) for _ in range(random_.randint(1, 30))),
        ]
        params = Params(
            temperature=random_.choice([0.0, 0.8]), seed=i, max_tokens=random_.randint(1, 25), ignore_eos=True
        )
        found.append((prompt, params))
    return found


# They begin at once, in 22 pages, and none can end beside the other: one has to give its pages back, whenever others are cancelled.
BEYOND_26_PAGES = [([token] * 80, Params(max_tokens=60, ignore_eos=True)) for token in (1, 2)]


class Guesser:
    """Knows what is going to come, and says some of it wrong."""

    def __init__(self, whole: list[list[int]], wrong: float) -> None:
        self.whole, self.random, self.wrong = whole, random.Random(len(whole)), wrong

    def guess(self, tokens: list[int], most: int) -> list[int]:
        known = next((full for full in self.whole if full[: len(tokens)] == list(tokens)), [])
        come = known[len(tokens) : len(tokens) + self.random.randint(0, most)]
        return [(token + (self.random.random() < self.wrong)) % 90 for token in come]


@needs_native
@pytest.mark.parametrize("model_type", few_of(TYPES))
@pytest.mark.parametrize("pages", few_of([26, 160]))
@pytest.mark.parametrize("snapshot_bytes", few_of([20_000, 1 << 20]))
def test_texts_are_those_of_each_alone_whatever_is_guessed_shared_and_cancelled(
    loaded: Any, model_type: str, pages: int, snapshot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = loaded(model_type)
    several = requests(pages + len(model_type), 16)
    wanted = [*BEYOND_26_PAGES, *several]
    alone = replace(LIMITS, remembers=False, max_num_seqs=1)
    with Engine(llm, alone) as engine:
        expected = [Answer(engine, prompt, params).wait() for prompt, params in wanted]
    whole = [prompt + tokens for (prompt, _), (tokens, _) in zip(wanted, expected, strict=True)]
    monkeypatch.setattr(nn.LLM, "guesser", lambda self, how, longest: Guesser(whole, 0.2))
    monkeypatch.setattr(Pay, "is_due", lambda self, cost: True)
    cancels = random.Random(pages)
    with Engine(llm, replace(LIMITS, pages=pages, snapshot_bytes=snapshot_bytes), spec="ngram") as engine:
        answers, others = [], []
        with held(engine):
            answers += [Answer(engine, prompt, params) for prompt, params in BEYOND_26_PAGES]
            for prompt, params in several:
                answers.append(Answer(engine, prompt, params))
                if cancels.random() < 0.4:
                    others.append(Answer(engine, prompt[:-1], replace(params, max_tokens=30)))
        for i, other in enumerate(others):
            if i % 2:  # the others are at any point, or have ended
                other.events.get(timeout=HANGS_SECONDS)
            engine.cancel(other.number)
        assert [answer.wait() for answer in answers] == expected
        counts = engine.counts()
        assert 0 < counts["accepted"] < counts["drafted"]
        assert (counts["preemptions"] > 0) == (pages == 26)
        assert 0 < counts["snapshot_bytes"] <= snapshot_bytes
        assert pages == 26 or any(answer.cached for answer in answers)
        engine.forget()
        Answer(engine, [5], Params(max_tokens=1)).wait()
        assert engine.counts()["snapshot_bytes"] == 0
        pool = engine._runner.pool
        assert not [*pool._held, *pool._saved, *pool._before]
        assert (
            pool.cache.used_pages <= 2
        )  # of the last request, which is dropped with the next, and of nobody's
    assert engine._scheduler.pages.free == pages


@needs_native
@pytest.mark.parametrize("model_type", few_of(TYPES, 2))
@pytest.mark.parametrize("temperature", few_of([0.8, 0.0]))
def test_generate_is_the_same_with_guesses(
    loaded: Any, model_type: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = loaded(model_type)
    prompts = [torch.tensor(prompt) for prompt, _ in requests(4, 3)]
    options = {"max_new_tokens": 30, "temperature": temperature, "seed": 3}
    for some in (prompts, prompts[:1]):
        plain = llm.generate_ids(some, **options)
        whole = [[*prompt.tolist(), *tokens.tolist()] for prompt, tokens in zip(some, plain, strict=True)]
        with monkeypatch.context() as patched:
            patched.setattr(nn.LLM, "guesser", lambda self, how, longest, whole=whole: Guesser(whole, 0.2))
            patched.setattr(Pay, "is_due", lambda self, cost: True)
            guessed = llm.generate_ids(some, **options, spec="ngram")
        assert all(map(torch.equal, guessed, plain))


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next"])
def test_what_many_prompts_begin_with_is_computed_once(loaded: Any, model_type: str) -> None:
    begin = [5 + i % 60 for i in range(2 * LIMITS.chunk)]
    wanted = [([*begin, i, 5], Params(max_tokens=1)) for i in range(2, 7)]
    with Engine(loaded(model_type), LIMITS) as engine:
        for answer in asked_together(engine, wanted):
            answer.wait()
    assert engine.stats.step_tokens.sum == len(begin) + 2 * 5


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next"])
def test_a_model_with_states_drafts(loaded: Any, model_type: str) -> None:
    llm = loaded(model_type)
    text = requests(4, 1)[0][0] + list(range(30))
    greedy = llm.generate_ids([torch.tensor(text)], 12)[0].tolist()
    draft = DraftModel(llm.session, 200)
    assert draft.guess(text, 5) == greedy[:5]
    assert draft.guess(text, 5) == greedy[:5]
    assert draft.guess([*text, *greedy[:3]], 4) == greedy[3:7]
    assert draft.guess([*text, *greedy[:4], 5], 4) != greedy[5:9]


@needs_native
@pytest.mark.parametrize("model_type", few_of(["falcon_h1", "mamba2"]))
def test_an_artefact_guesses_and_shares_as_its_folder_does(
    loaded: Any, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pay, "is_due", lambda self, cost: True)
    folder = loaded(model_type)
    nn.artefact.export(folder.path, tmp_path / "made")
    repeating = [7, 8, 9, 10, 11] * 9
    wanted = [*requests(3, 6), (repeating, Params(max_tokens=20)), ([*repeating, 5], Params(max_tokens=9))]

    def answers(llm: nn.LLM) -> tuple[Any, float]:
        with Engine(llm, LIMITS, spec="ngram") as engine:
            came = []
            for prompt, params in wanted:
                answer = Answer(engine, prompt, params)
                came.append((answer.wait(), answer.cached))
            return came, engine.counts()["drafted"]

    made = nn.LLM.load(tmp_path / "made")
    assert answers(made) == answers(folder)
    assert answers(made)[1] > 0
    assert any(cached for _, cached in answers(made)[0])


def test_an_artefact_that_was_exported_without_the_method_says_so(loaded: Any, tmp_path: Path) -> None:
    nn.LLM.load(loaded("mamba2").path).save(tmp_path / "old")
    old = nn.LLM.load(tmp_path / "old")
    assert old.generate_ids([torch.tensor([1, 2])], 3)[0].shape == (3,)
    with pytest.raises(RunError, match=r"^tokens cannot be guessed: the model has no method 'extend'"):
        old.generate_ids([torch.tensor([1, 2])], 3, spec="ngram")


@needs_native
def test_guesses_are_taken_back_behind_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = random_folder(tmp_path / "model", "gpt_oss", sliding_window=16)
    llm = nn.LLM.load(folder, extends=True)
    prompts = [torch.tensor(prompt) for prompt, _ in requests(4, 3)]
    for some in (prompts, prompts[:1]):
        plain = llm.generate_ids(some, 40)
        whole = [[*prompt.tolist(), *tokens.tolist()] for prompt, tokens in zip(some, plain, strict=True)]
        with monkeypatch.context() as patched:
            patched.setattr(nn.LLM, "guesser", lambda self, how, longest, whole=whole: Guesser(whole, 0.3))
            patched.setattr(Pay, "is_due", lambda self, cost: True)
            assert all(map(torch.equal, llm.generate_ids(some, 40, spec="ngram"), plain))
