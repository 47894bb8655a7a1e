# SPDX-License-Identifier: Apache-2.0
"""The engine over a real model: each request gets the answer that it would get alone, and gives back what it took."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from answering import Answer, Stop, asked_together, held
from patience import HANGS_SECONDS
from serving import FOLDER, LIMITS

import nnfront as nn
from nnfront.engine.compute import Compute
from nnfront.engine.params import Params
from nnfront.engine.schedule import Limits, Scheduler
from nnfront.serve import engine as serving_engine
from nnfront.serve.engine import Engine


def requests(text: list[int], count: int) -> list[tuple[list[int], Params]]:
    """Prompts of many lengths, some with the same beginning, greedy and drawn."""
    random_ = random.Random(3)
    found = []
    for i in range(count):
        first = random_.choice([0, 0, random_.randrange(4000)])
        prompt = text[first : first + random_.randint(1, 120)]
        params = Params(
            temperature=random_.choice([0.0, 0.8, 1.3]),
            top_k=random_.choice([None, 20]),
            top_p=random_.choice([None, 0.9]),
            seed=i,
            max_tokens=random_.randint(1, 30),
            repetition_penalty=random_.choice([1.0, 1.2]),
            presence_penalty=random_.choice([0.0, 0.5]),
        )
        found.append((prompt, params))
    return found


def alone(llm: nn.LLM, wanted: list[tuple[list[int], Params]]) -> list[tuple[list[int], str]]:
    """Each request's answer when there is no other, and nothing of one before is left."""
    with Engine(llm, replace(LIMITS, remembers=False)) as engine:
        return [Answer(engine, prompt, params).wait() for prompt, params in wanted]


@pytest.mark.parametrize("rows", [2, 4])
def test_a_decoding_call_has_as_many_rows_as_the_back_end_says(
    llm: nn.LLM, text: list[int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(llm.session.backend), "decode_rows", rows)
    seen: list[int] = []
    with Engine(llm, LIMITS) as engine:
        call = Compute._call

        def counted(self: Compute, method: str, sequences: list[int], *more: Any) -> Any:
            seen.append(len(sequences) if method == "decode" else 0)
            return call(self, method, sequences, *more)

        monkeypatch.setattr(Compute, "_call", counted)
        answers = asked_together(engine, [(text[i : i + 9], Params(max_tokens=12)) for i in range(5)])
        for answer in answers:
            answer.wait()
    assert max(seen) == rows


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to count threads")
def test_threads_that_computed_for_the_caller_end_when_the_engine_begins(llm: nn.LLM) -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before, many = torch.get_num_threads(), torch.ones(1 << 20)
    try:
        torch.set_num_threads(3)
        many.neg()
        with_team = threads()
        with Engine(llm, LIMITS):
            assert threads() <= with_team + 1 - 2  # the engine's comes, the team of three is one again
        assert many.neg()[0] == -1  # and the caller can compute as before
    finally:
        torch.set_num_threads(before)


def test_a_greedy_answer_is_that_of_generate(llm: nn.LLM, engine: Engine, text: list[int]) -> None:
    expected = llm.generate_ids(torch.tensor([text[:50]]), max_new_tokens=20)[0].tolist()
    assert Answer(engine, text[:50], Params(max_tokens=20, ignore_eos=True)).wait() == (expected, "length")


def test_answers_do_not_depend_on_neighbours(llm: nn.LLM, text: list[int]) -> None:
    wanted = requests(text, 16)
    expected = alone(llm, wanted)
    with Engine(llm, LIMITS) as engine:
        answers = asked_together(engine, wanted)
        assert [answer.wait() for answer in answers] == expected
        assert any(answer.cached for answer in answers)


@pytest.mark.parametrize("cancels", [False, True], ids=["all", "the first leaves"])
@pytest.mark.parametrize("packs", [None, False], ids=["as here", "chunks"])
def test_what_many_prompts_begin_with_is_computed_once(
    llm: nn.LLM, text: list[int], packs: bool | None, cancels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packs is not None:
        monkeypatch.setattr(Compute, "packs", packs)
    common = 3 * LIMITS.chunk
    wanted = [(text[:common] + text[i : i + 5], Params(max_tokens=1)) for i in range(1, 9)]
    expected = alone(llm, wanted)
    with Engine(llm, LIMITS) as engine:
        stop = Stop(engine, 1 if cancels else -1, lambda: bool(engine._cancelled))
        answers = asked_together(engine, wanted)
        if cancels:
            stop.is_there.wait(HANGS_SECONDS)
            engine.cancel(answers[0].number)
        ends = [answer.wait() for answer in answers]
    assert ends[cancels:] == expected[cancels:]
    assert engine.stats.step_tokens.sum == common + 5 * (8 - cancels)


def test_answers_do_not_depend_on_pre_emption(llm: nn.LLM, text: list[int]) -> None:
    wanted = requests(text, 12)
    expected = alone(llm, wanted)
    few = Limits(max_model_len=256, pages=32, max_num_seqs=6, page_size=8, chunk=32, step_tokens=64)
    with Engine(llm, few) as engine:
        answers = asked_together(engine, wanted)
        assert [answer.wait() for answer in answers] == expected
        assert engine.counts()["preemptions"] > 0


def test_the_count_of_pages_is_the_caches(llm: nn.LLM, text: list[int]) -> None:
    with Engine(llm, LIMITS) as engine:
        with held(engine):
            answers = asked_together(engine, requests(text, 12))
            for answer in answers[::3]:
                engine.cancel(answer.number)
        ends = [answer.wait()[1] for answer in answers]
        assert {"cancelled", "length"} <= set(ends)
        Answer(engine, text[:9], Params(max_tokens=1)).wait()
        assert engine._runner.pool.cache.used_pages >= LIMITS.pages - engine._scheduler.pages.free > 0
        engine.forget()
        Answer(engine, text[:9], Params(max_tokens=1)).wait()
    assert engine._scheduler.pages.free == LIMITS.pages


def test_a_model_that_fails_tells_all_that_run_and_the_engine_goes_on(
    llm: nn.LLM, engine: Engine, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._runner.pool, "row", lambda _: 1 / 0)
    tokens, end = Answer(engine, text[:9], Params(max_tokens=3)).wait()
    assert (tokens, end) == ([], "errordivision by zero")
    monkeypatch.undo()
    assert Answer(engine, text[:9], Params(max_tokens=3)).wait()[1] == "length"


def test_a_step_that_cannot_be_planned_ends_those_that_wait_one_by_one(
    llm: nn.LLM, engine: Engine, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "step", lambda *_: 1 / 0)
    ends = [Answer(engine, text[:9], Params(max_tokens=3)).wait() for _ in range(2)]
    assert ends == [([], "errordivision by zero")] * 2
    monkeypatch.undo()
    assert Answer(engine, text[:9], Params(max_tokens=3)).wait()[1] == "length"


def test_a_draw_that_fails_in_an_unknown_way_does_not_stop_the_engine(
    engine: Engine, text: list[int]
) -> None:
    class Broken:
        is_over = False

        def allowed(self, vocab: int) -> np.ndarray:
            return 1 / 0  # type: ignore[return-value]

        def took(self, token: int) -> None: ...

    assert (
        Answer(engine, text[:9], Params(max_tokens=3, grammar=Broken())).wait()[1] == "errordivision by zero"
    )
    assert Answer(engine, text[:9], Params(max_tokens=3)).wait()[1] == "length"


def test_new_weights_answer_from_the_next_request_on_without_what_the_old_ones_computed(
    text: list[int],
) -> None:
    llm = nn.LLM.load(FOLDER)
    norm = llm.session.weights["model.norm.weight"].clone()
    prompt, params = text[:80], Params(max_tokens=8, ignore_eos=True)
    with Engine(llm, LIMITS) as engine:
        before = Answer(engine, prompt, params).wait()
        changed = {"model.norm.weight": norm * torch.linspace(-1, 1, len(norm)).to(norm.dtype)}
        running = Answer(engine, prompt, Params(max_tokens=100, ignore_eos=True))
        engine.update(changed)
        answer = Answer(engine, prompt, params)
        assert answer.wait() != before
        assert answer.cached == 0
        assert len(running.wait()[0]) == 100
        engine.update({"model.norm.weight": norm})
        assert Answer(engine, prompt, params).wait() == before


def test_a_request_that_takes_too_long_ends(
    engine: Engine, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(engine):
        clock = SimpleNamespace(monotonic=itertools.count().__next__)  # a second passes at each look at it
        monkeypatch.setattr(serving_engine, "time", clock)
        answer = Answer(engine, text[:9], Params(max_tokens=200, ignore_eos=True), seconds=50.0)
    tokens, end = answer.wait()
    assert end == "deadline"
    assert len(tokens) < 200


def test_closing_waits_for_answers_only_if_asked_to(llm: nn.LLM, text: list[int]) -> None:
    engine = Engine(llm, LIMITS)
    answers = [Answer(engine, text[:9], Params(max_tokens=20, ignore_eos=True)) for _ in range(9)]
    engine.close(drain=True)
    assert [answer.wait()[1] for answer in answers] == ["length"] * 9
    with pytest.raises(nn.errors.RunError, match="the engine is being closed, and takes no more requests"):
        engine.submit(text[:3], Params(), print)
    engine = Engine(llm, LIMITS)
    Stop(engine, 20, lambda: engine._is_closing)
    answers = asked_together(engine, [(text[:9], Params(max_tokens=200, ignore_eos=True))] * 9)
    engine.close()
    assert {answer.wait()[1] for answer in answers} == {"cancelled"}
