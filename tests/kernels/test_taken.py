# SPDX-License-Identifier: Apache-2.0
"""Tokens of requests that are answered together, drawn by a kernel where the logits are: each request's are those that it has alone."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from few_of import few_of
from nnfront_kernels import ahead
from nnfront_kernels.common import launched_by, planning_for

import nnfront as nn
from nnfront.backends.cuda.sampling import COMMON, enumerate_draws
from nnfront.engine import compute, taken
from nnfront.engine.draw import COLDEST, Draw
from nnfront.engine.params import Params
from nnfront.engine.schedule import Limits
from nnfront.errors import RunError
from nnfront.llm.sampling import Sampler
from nnfront.serve.engine import Engine

FOLDER = Path(nn.__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
LIMITS = Limits(max_model_len=128, pages=80, max_num_seqs=8, page_size=8, chunk=32, step_tokens=64)
PLAIN = [
    Params(),
    Params(temperature=1.0, seed=3),
    Params(temperature=1.0, seed=4),
    Params(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=5),
]
SEEN_BY_THE_HOST = [
    Params(logprobs=2),
    Params(temperature=1.0, seed=3, repetition_penalty=1.2),
    Params(temperature=1.0, seed=3, presence_penalty=0.5),
    Params(temperature=1.0, seed=3, frequency_penalty=0.5),
    Params(temperature=1.0, seed=3, min_tokens=4),
    Params(temperature=1.0, seed=3, logit_bias={7: 5.0}),
    Params(temperature=COLDEST / 2, seed=3),
]


@contextmanager
def drawing_there() -> Iterator[list[int]]:
    """Inside of this kernels draw as on a GPU; the bytes of each tensor that goes to the host."""
    fetched: list[int] = []

    def fetching(tensor: torch.Tensor) -> Any:
        fetched.append(tensor.nbytes)
        return lambda: tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken, "draws_there", lambda logits: True)
        patch.setattr(taken, "fetching", fetching)
        yield fetched


def answers(engine: Engine, wanted: Sequence[tuple[list[int], Params]]) -> list[list[int]]:
    """The tokens of requests that are all there before one is begun with."""
    coming: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in wanted]
    with engine._changed:
        for (prompt, params), events in zip(wanted, coming, strict=True):
            engine.submit(prompt, params, events.put)
    found: list[list[int]] = [[] for _ in wanted]
    for tokens, events in zip(found, coming, strict=True):
        while (event := events.get(timeout=120)).finish is None:
            tokens.append(event.token)
        assert event.finish == "length", event.error
        tokens.append(event.token)
    return found


def together(spec: str | None) -> None:
    """Plain requests beside others, alone, and with tokens guessed ahead."""
    more = {"max_tokens": 6, "ignore_eos": True}
    wanted = [
        ([5 + i, 9, 30, 9, 30, 9], Params(**{**vars(params), **more}))
        for i, params in enumerate([*PLAIN, *SEEN_BY_THE_HOST[:3]])
    ]
    llm = nn.LLM.load(FOLDER, extends=spec is not None)
    with drawing_there() as fetched:
        with Engine(llm, LIMITS, spec=spec) as engine:
            beside = answers(engine, wanted)
            fetched.clear()
            plain = answers(engine, wanted[: len(PLAIN)])
        assert max(fetched) <= 8 * 64, "a token of each row, and no logits"
        with Engine(llm, LIMITS) as engine:
            alone = [answers(engine, [each])[0] for each in wanted]
    assert beside == alone
    assert plain == alone[: len(PLAIN)]
    with Engine(
        llm, LIMITS
    ) as engine:  # the host draws: what it sees it sees on a GPU as well, and the likeliest is the likeliest
        by_host = answers(engine, wanted)
    assert by_host[0] == alone[0]
    assert by_host[len(PLAIN) :] == alone[len(PLAIN) :]


@pytest.mark.parametrize("spec", few_of([None, "ngram"]))
def test_a_requests_tokens_are_those_that_it_has_alone_whoever_draws_for_its_neighbours(interpreted, spec):
    interpreted(together, spec)


def rows() -> None:
    """Rows of several ways of drawing in one call; a row without a token; the draws that `generate` makes."""
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)) * 3
    draws = [Draw(params, []) for params in [*PLAIN, *SEEN_BY_THE_HOST[:2]]]
    asked = [*((draw, i) for i, draw in enumerate(draws)), None, (draws[1], 9)]
    with drawing_there():
        found = taken.taken(logits, asked)
        for i, each in enumerate(asked):
            (one,) = taken.taken(logits[i : i + 1], [each])
            assert type(one) is int or torch.equal(torch.tensor(one), torch.tensor(found[i])), i
            assert type(one) is not int or one == found[i], i
        assert [type(each) is int for each in found] == [True] * 4 + [False] * 2 + [True] * 2
        assert found[0] == int(logits[0].argmax())
        sampler = Sampler(PLAIN[1], on_kernel=True)
        draw = Draw(PLAIN[1], [])
        for row in logits:
            (token,) = taken.taken(row[None], [(draw, draw.drawn)])
            assert draw(token) == sampler(row[None]).item()
        assert draw.drawn == len(logits)
        for params in PLAIN[:2]:
            (none,) = taken.taken(logits[:1] * torch.nan, [(draw, 0)])
            with pytest.raises(RunError, match="hold NaN, or no token to draw"):
                Draw(params, [])(none)


def test_a_call_draws_rows_of_several_ways_and_gives_logits_of_others(interpreted):
    interpreted(rows)


def launched(vocab: int) -> tuple[set[str], set[str]]:
    """The keys of what is launched for requests of every way, and of what is compiled ahead to draw."""
    keys: list[set[str]] = [set(), set()]
    for found, draw in zip(keys, (every_way, enumerate_draws), strict=True):

        def collect(plan: Any, found: set[str] = found) -> None:
            found.add(ahead.key_of(plan, "sm_90"))

        with planning_for("sm_90"), launched_by(collect), pytest.MonkeyPatch.context() as patch:
            patch.setattr(taken, "draws_there", lambda logits: True)
            draw(torch.zeros(1 if draw is enumerate_draws else 6, vocab))
    return keys[0], keys[1]


def every_way(logits: torch.Tensor) -> None:
    for given in COMMON:
        draw = Draw(Params(**given, seed=1), [])
        for rows in (logits, logits[:1]):
            taken.taken(rows, [(draw, 0)] * len(rows))
    taken.taken(logits, [(draw, 0)] * 3 + [(Draw(Params(), []), 0)] * (len(logits) - 3))


@pytest.mark.parametrize("vocab", [32000, 128256])
def test_what_draws_is_compiled_ahead(compiled, vocab):
    found, known = compiled(launched, vocab)
    assert found
    assert found <= known


def test_what_only_the_host_knows_is_drawn_there():
    assert all(
        Draw(params, []).way == (params.temperature, params.top_k, params.top_p, params.min_p)
        for params in PLAIN
    )
    assert [Draw(params, []).way for params in SEEN_BY_THE_HOST] == [None] * len(SEEN_BY_THE_HOST)


@pytest.mark.parametrize(("packs", "sends"), [(True, 2), (False, 1)])
def test_a_call_sends_its_tokens_and_fetches_what_is_taken_without_waiting_for_more(
    monkeypatch, packs, sends
):
    llm, log = nn.LLM.load(FOLDER, extends=packs), []
    for module, name in ((compute, "sent"), (taken, "fetching")):
        whole = getattr(module, name)
        told = partial(lambda name, whole, *given: log.append(name) or whole(*given), name, whole)
        monkeypatch.setattr(module, name, told)
    monkeypatch.setattr(compute.Compute, "packs", packs)
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    with Engine(llm, LIMITS) as engine:
        answers(engine, [([5, 9, 30], Params(max_tokens=3, ignore_eos=True))] * 2)
    calls = 3 if packs else 4  # of two prompts together, or each alone, then two of both
    assert log == ([*["sent"] * sends, "fetching"] * calls)
