# SPDX-License-Identifier: Apache-2.0
"""Answers that go on in the middle of a chunk: not a bit of any text changes, wherever it is set aside, and tokens stay as close as was asked for."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import Answer, asked_together, requests
from few_of import few_of
from model_folders import random_folder
from serving import FOLDER, LIMITS

import nnfront as nn
from nnfront.backends.cpu.extension import NATIVE
from nnfront.engine.compute import Compute
from nnfront.engine.pace import Pace
from nnfront.engine.params import Params
from nnfront.engine.schedule import Limits, Scheduler
from nnfront.engine.sequence import Sequence
from nnfront.engine.speculate import Pay
from nnfront.errors import RunError
from nnfront.serve.engine import Engine
from nnfront.state.between import between_steps, set_aside

PACED = replace(LIMITS, inter_token_ms=1)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def load(model_type: str) -> nn.LLM:
        if model_type == "shipped":
            return nn.LLM.load(FOLDER, extends=True)
        more = {"sliding_window": 12} if model_type in ("gpt_oss", "gemma4_text") else {}
        folder: Path = random_folder(tmp_path_factory.mktemp("models") / model_type, model_type, **more)
        return nn.LLM.load(folder, extends=True)

    return load


@pytest.fixture(autouse=True)
def separate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are calls of their own, as where rows of a call are not alike."""
    monkeypatch.setattr(Compute, "packs", False)


@pytest.fixture
def asides(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has chunks set aside at random places, where answers can go on; how many of them did each time."""
    seen: list[int] = []
    random_, aside = random.Random(1), Scheduler.aside

    def counted(self: Scheduler) -> Any:
        step = aside(self)
        seen.append(0 if step is None else len(step.decode))
        return step

    monkeypatch.setattr(Pace, "is_due", property(lambda self: random_.random() < 0.2))
    monkeypatch.setattr(Scheduler, "aside", counted)
    return seen


def together(engine: Engine, wanted: list[tuple[list[int], Params]]) -> list[tuple[list[int], str]]:
    """What comes of requests of which none is begun before all are there."""
    return [answer.wait() for answer in asked_together(engine, wanted)]


@pytest.mark.skipif(NATIVE is None, reason="products of few rows are the extension's")
@pytest.mark.parametrize(
    ("model_type", "spec"),
    few_of(
        [
            (model_type, spec)
            for model_type in (
                "shipped",
                "gpt_oss",
                "qwen3_next",
                "mamba2",
                "deepseek_v3",
                "lfm2",
                "gemma4_text",
            )
            for spec in (None, "ngram")
        ],
        2,
    ),
)
def test_texts_are_those_of_each_alone_wherever_chunks_are_set_aside(
    loaded: Any, model_type: str, spec: str | None, asides: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = loaded(model_type)
    wanted = requests(9, 90)
    with Engine(llm, replace(LIMITS, remembers=False, max_num_seqs=1)) as engine:
        expected = [Answer(engine, prompt, params).wait() for prompt, params in wanted]
    assert not asides
    monkeypatch.setattr(Pay, "is_due", lambda self, cost: True)
    for pages in (160, 40):
        with Engine(llm, replace(PACED, pages=pages), spec=spec) as engine:
            assert together(engine, wanted) == expected
            engine.forget()
            Answer(engine, [5], Params(max_tokens=1)).wait()
        assert engine._scheduler.pages.free == pages
    assert sum(asides) > 20
    assert max(asides) > 1


def test_whole_chunks_are_computed_unless_a_pace_is_asked_for(llm: nn.LLM, asides: list[int]) -> None:
    with Engine(llm, LIMITS) as engine:
        together(engine, requests(6, 90))
    assert not asides


def test_an_error_of_those_that_go_on_ends_all_and_the_engine_begins_anew(
    loaded: Any, asides: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = requests(9, 90)
    with Engine(loaded("shipped"), PACED) as engine:
        expected = [Answer(engine, *each).wait() for each in wanted]
        with monkeypatch.context() as patched:
            patched.setattr(Scheduler, "aside", lambda self: 1 / 0)
            ends = together(engine, wanted)
        assert any("division by zero" in end for _, end in ends)
        assert together(engine, wanted) == expected


def test_a_call_that_is_set_aside_keeps_its_cache_from_all_that_are_not_inside(llm: nn.LLM) -> None:
    session = llm.session
    cache = session.make_cache(batch=2, max_seq=64, page_size=16)
    ids = torch.arange(2, 34)[None]
    refused, tokens = [], []

    def between() -> None:
        with pytest.raises(RunError, match="is in use") as error:
            session["decode"](ids[:, :1], cache.rows(1))
        refused.append(error.value)
        with set_aside(cache.use):
            tokens.append(session["decode"](ids[:, :1], cache.rows(1)))

    with between_steps(between):
        together = session["prefill"](ids, cache.rows(0))
    assert len(refused) == len(tokens) > 1
    assert cache.lengths == [32, len(tokens)]
    apart = session.make_cache(batch=2, max_seq=64, page_size=16)
    assert torch.equal(session["prefill"](ids, apart.rows(0)), together)
    alone = [session["decode"](ids[:, :1], apart.rows(1)) for _ in tokens]
    assert all(map(torch.equal, tokens, alone))


class Simulated:
    """Clients of an engine in simulated time: a token of a prompt takes a millisecond, layers of it are steps of 4; a decoding step 25 and 5 for each row."""

    def __init__(self, gap: float) -> None:
        self.now = 0.0
        self.pace = Pace(gap, clock=lambda: self.now)
        self.scheduler = Scheduler(Limits(2048, 512, page_size=16, chunk=256, step_tokens=256))
        self.random = random.Random(3)
        self.came: dict[int, list[float]] = {}

    def run(self, clients: int, requests: int) -> list[float]:
        """The times between tokens of all answers."""
        left = [self.random.randint(128, 512) for _ in range(requests)]

        def ask() -> None:
            if left:
                arrival, length = requests - len(left), left.pop()
                prompt = [self.random.randrange(1 << 40) for _ in range(length)]
                self.scheduler.submit(Sequence(arrival, prompt, length, length + 64))
                self.came[arrival] = []

        for _ in range(clients):
            ask()
        while not self.scheduler.is_idle:
            step = self.scheduler.step()
            if step.decode:
                self._decode(step.decode, ask)
            for sequence, count in step.chunks:
                running = self.scheduler.running
                answering = sum(each.answers for each in running)
                self.pace.divide(len(self.scheduler.waiting) + len(running) - answering, answering)
                for _ in range(count // 4):
                    self.now += 0.004
                    if self.pace.gap and self.pace.is_due:
                        aside = self.scheduler.aside()
                        self._decode(aside.decode, ask) if aside else self.pace.wait()
                self.scheduler.computed(sequence, count)
                if sequence.answers:
                    self._token(sequence, ask)
        return sorted(b - a for times in self.came.values() for a, b in pairwise(times))

    def _decode(self, sequences: list[Sequence], ask: Any) -> None:
        began = self.now
        self.now += 0.025 + 0.005 * len(sequences)
        for sequence in sequences:
            self.scheduler.computed(sequence, 1)
            self._token(sequence, ask)
        self.pace.took(began)

    def _token(self, sequence: Sequence, ask: Any) -> None:
        sequence.tokens.append(0)
        self.came[sequence.arrival].append(self.now)
        if len(sequence.tokens) == sequence.most:
            self.scheduler.finish(sequence)
            ask()


@pytest.mark.parametrize(("gap", "lost"), [(0.065, 0.08), (0.12, 0.05)])
@pytest.mark.parametrize("clients", [4, 16])
def test_tokens_stay_as_close_as_was_asked_for_and_little_time_is_lost(
    clients: int, gap: float, lost: float
) -> None:
    whole, paced = Simulated(0.0), Simulated(gap)
    gaps = {each.pace.gap: each.run(clients, 6 * clients) for each in (whole, paced)}
    assert gaps[0.0][-1] > 0.28  # a chunk of 256, and a step of those that answer
    step = 0.025 + 0.005 * clients
    most = max(gap, step * 2)  # the gap, or as much of the time for prompts as they have at least
    assert gaps[gap][int(0.99 * len(gaps[gap]))] <= most + 0.001  # though steps of a chunk take 4 times that
    assert gaps[gap][-1] <= most + 0.004 + step
    assert paced.now <= (1 + lost) * whole.now


def test_prompts_get_their_part_however_long_steps_take() -> None:
    now = [0.0]
    pace = Pace(0.1, clock=lambda: now[0])
    now[0] = 1.0
    pace.took(0.0)  # a step of a second
    now[0] = 1.95
    assert not pace.is_due
    now[0] = 2.05
    assert pace.is_due
    pace.divide(prompts=6, answers=1)
    assert not pace.is_due
    now[0] = 4.05
    assert pace.is_due
    pace.divide(prompts=6, answers=0)
    assert not pace.is_due
    pace.divide(prompts=1, answers=3)
    now[0] = 2.05
    assert pace.is_due
    pace.wait()
    assert not pace.is_due
    now[0] = 3.0
    pace.took(2.96)  # one of 40 ms
    now[0] = 3.055
    assert not pace.is_due
    now[0] = 3.065
    assert pace.is_due


@pytest.mark.parametrize("together", [4, 16])
def test_calls_have_as_many_rows_as_kernels_take_together(together: int) -> None:
    now = [0.0]
    pace = Pace(0.1, together, clock=lambda: now[0])
    for rows in (8, 64, 128, 256) * 3:
        now[0] += 0.03 + 0.001 * rows
        pace.computed(now[0] - 0.03 - 0.001 * rows, rows)
    assert pace.tokens(8, 1, 256) == 70 // together * together - 8
    assert pace.tokens(16, 1, 20) == 20
    assert all((pace.tokens(answers, 4, 4096) + answers) % together == 0 for answers in range(1, 40))
    assert pace.tokens(0, 1, 256) == 256  # no answer waits


def test_prompts_get_half_of_a_call_until_several_wait_or_few_answer() -> None:
    pace = Pace(0.001, rows=1, clock=lambda: 1.0)
    for rows in (8, 64, 128, 256):
        pace.computed(1.0 - 3.0 - 0.001 * rows, rows)

    def part(answers: int, prompts: int) -> float:
        tokens = pace.tokens(answers, prompts, 1 << 20)
        return round(tokens / (3000 + answers + tokens), 2)

    assert part(3, 1) == part(2, 2) == part(12, 2) == 0.5
    assert part(12, 4) == 0.8
    assert part(1, 3) == 0.75
    assert part(12, 40) == 0.9
