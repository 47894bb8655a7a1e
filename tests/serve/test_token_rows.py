# SPDX-License-Identifier: Apache-2.0
"""Tokens of prompts and of answers in one call, a row for each: each has the bits that it has alone, however prompts are cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
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
from nnfront.engine.speculate import Pay
from nnfront.errors import RunError
from nnfront.llm.methods import STEP
from nnfront.serve.engine import Engine
from nnfront.state.token_rows import TokenRows

pytestmark = pytest.mark.skipif(NATIVE is None, reason="rows are alike by the extension's kernels")
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
QUANTS = ["int8", "int4", "uint4", "fp8", "nvfp4", "mxfp4", "q4_k", "q6_k"]
INTEGERS = [nn.passes.QuantScheme(name, activations="int8") for name in ("int4", "q4_k")]
LONG = [37, 5, 18]
"""How many tokens three sequences have."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def load(model_type: str, dtype: str = "bfloat16", quant: Any = None) -> nn.LLM:
        if model_type == "shipped":
            return nn.LLM.load(FOLDER, extends=True, dtype=dtype, quant=quant)
        more = {} if model_type in ("mamba2", "qwen3_moe") else dict(SMALL)
        more |= {"sliding_window": 12} if model_type == "gemma2" else {}
        folder: Path = tmp_path_factory.mktemp("models") / model_type
        return nn.LLM.load(random_folder(folder, model_type, dtype, **more), extends=True)

    return load


def only_where_rows_are_alike(llm: nn.LLM, quant: Any) -> None:
    """Matrix tiles add up rows of a quantised weight in another order than is done for a few of them; servers know, and do not mix tokens then."""
    if not llm.session.backend.packs(llm.session.program.methods[STEP], 64):
        assert NATIVE.has_tiles()
        assert quant in QUANTS
        pytest.skip("the processor has matrix tiles, and the weights are quantised")


def texts(vocab: int) -> list[list[int]]:
    random_ = random.Random(2)
    return [[random_.randrange(2, vocab) for _ in range(count)] for count in LONG]


def stepped(
    llm: nn.LLM, cache: Any, pieces: Sequence[dict[int, int]], known: list[list[int]]
) -> list[list[torch.Tensor]]:
    """The logits of each token of three sequences that are computed in calls of such pieces: how many tokens of which."""
    found: list[list[torch.Tensor]] = [[] for _ in known]
    for counts in pieces:
        given = [known[which][len(found[which]) :][:count] for which, count in counts.items()]
        tokens = torch.tensor([token for each in given for token in each])[:, None]
        rows = TokenRows(cache, list(counts.items()))
        logits = llm.session[STEP](tokens, rows, torch.arange(len(tokens)))[:, 0]
        for which, each in zip(counts, logits.split([*counts.values()]), strict=True):
            found[which] += each
    return found


def one_by_one(llm: nn.LLM, known: list[list[int]]) -> list[list[torch.Tensor]]:
    """The logits of each token, decoded one after the other, each sequence in a cache of its own."""
    found = []
    for tokens in known:
        cache = llm.session.make_cache(batch=1, max_seq=64, page_size=8)
        found.append([llm.session["decode"](torch.tensor([[token]]), cache)[0, 0] for token in tokens])
    return found


def random_pieces(random_: random.Random) -> list[dict[int, int]]:
    left, pieces = dict(enumerate(LONG)), []
    while left:
        chosen = random_.sample([*left], random_.randint(1, len(left)))
        counts = {which: random_.randint(1, min(left[which], random_.choice([1, 9, 40]))) for which in chosen}
        pieces.append(counts)
        left = {which: count - counts.get(which, 0) for which, count in left.items()}
        left = {which: count for which, count in left.items() if count}
    return pieces


@pytest.mark.parametrize(
    ("model_type", "quant"),
    few_of([(model, None) for model in ("shipped", "gemma2", "qwen3", "olmo2")], 2)
    + few_of([("shipped", quant) for quant in QUANTS], 2)
    + [pytest.param("shipped", quant, id=f"shipped-{quant.format}-activations-int8") for quant in INTEGERS],
)
def test_every_token_has_the_bits_that_it_has_alone_however_sequences_are_cut(
    loaded: Any, model_type: str, quant: Any
) -> None:
    llm = loaded(model_type, quant=quant)
    only_where_rows_are_alike(llm, quant)
    known = texts(90)
    expected = one_by_one(llm, known)
    for seed in range(6):
        cache = llm.session.make_cache(batch=3, max_seq=64, page_size=8)
        found = stepped(llm, cache, random_pieces(random.Random(seed)), known)
        assert all(
            torch.equal(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)
        )
        assert cache.lengths == LONG


def test_a_sequence_that_shares_a_page_writes_to_a_copy(loaded: Any) -> None:
    llm, known = loaded("shipped"), texts(90)
    expected = one_by_one(llm, known[:1])[0]
    cache = llm.session.make_cache(batch=2, max_seq=64, page_size=8, pages=32)
    stepped(llm, cache, [{0: 11}], known)
    cache.rows(1).begin_with(cache.rows(0).hold(11))
    other = [known[0][:11] + known[1], known[0][:11] + known[1]]
    (alone,) = one_by_one(llm, other[:1])
    tokens = torch.tensor([*known[0][11:20], *known[1]])[:, None]
    logits = llm.session[STEP](tokens, TokenRows(cache, [(0, 9), (1, 5)]), torch.tensor([8, 13]))[:, 0]
    assert torch.equal(logits[0], expected[19])
    assert torch.equal(logits[1], alone[15])


def test_a_call_that_finds_too_few_pages_leaves_everything_as_it_was(loaded: Any) -> None:
    llm, known = loaded("shipped"), texts(90)
    cache = llm.session.make_cache(batch=2, max_seq=64, page_size=8, pages=5)
    stepped(llm, cache, [{0: 7, 1: 5}], known)
    tokens = torch.tensor([*known[0][7:20], *known[0][:20]])[:, None]
    with pytest.raises(RunError, match="out of pages"):
        llm.session[STEP](tokens, TokenRows(cache, [(0, 13), (1, 20)]), torch.tensor([0]))
    assert cache.lengths == [7, 5]
    assert cache.free_pages == 3
    found = llm.session[STEP](torch.tensor([[known[0][7]]]), TokenRows(cache, [(0, 1)]), torch.tensor([0]))
    assert torch.equal(found[0, 0], one_by_one(llm, known[:1])[0][7])


def test_rows_are_refused_behind_the_end_of_a_cache(loaded: Any) -> None:
    llm, known = loaded("shipped"), texts(90)
    cache = llm.session.make_cache(batch=2, max_seq=16, page_size=8)
    stepped(llm, cache, [{0: 10}], known)
    tokens = torch.tensor(known[0][10:17])[:, None]
    with pytest.raises(RunError, match="cache is full"):
        llm.session[STEP](tokens, TokenRows(cache, [(0, 7)]), torch.tensor([0]))
    assert cache.lengths == [10, 0]


@pytest.mark.parametrize(
    ("model_type", "dtype", "packs"),
    [
        ("shipped", "bfloat16", True),
        ("shipped", "float32", False),  # products by oneDNN add up rows in other orders, of other counts
        ("gemma2", "bfloat16", True),
        ("mamba2", "bfloat16", False),  # states of whole sequences
        ("qwen3_moe", "bfloat16", False),  # experts take few rows in C
    ],
)
def test_calls_are_packed_where_rows_are_alike(loaded: Any, model_type: str, dtype: str, packs: bool) -> None:
    with Engine(loaded(model_type, dtype), LIMITS) as engine:
        assert engine._runner.compute.packs == packs


@pytest.mark.parametrize(
    ("model_type", "quant", "spec"),
    few_of([(model, None, spec) for model in ("shipped", "gemma2", "qwen3") for spec in (None, "ngram")], 2)
    + few_of([("shipped", quant, None) for quant in QUANTS]),
)
def test_texts_are_those_of_each_alone_whatever_a_step_has_room_for(
    loaded: Any, model_type: str, quant: str | None, spec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, random_ = loaded(model_type, quant=quant), random.Random(1)
    only_where_rows_are_alike(llm, quant)
    # Pages are wanted back where answers grow beside each other.
    wanted = [(prompt, replace(params, max_tokens=46)) for prompt, params in requests(9, 90)]
    with Engine(llm, replace(LIMITS, remembers=False, max_num_seqs=1)) as engine:
        expected = [Answer(engine, prompt, params).wait() for prompt, params in wanted]
    calls: list[str] = []
    call = Compute._call
    monkeypatch.setattr(Compute, "_call", lambda *given: calls.append(given[1]) or call(*given))
    monkeypatch.setattr(Pay, "is_due", lambda self, cost: True)
    monkeypatch.setattr(Pace, "tokens", lambda self, *counts: random_.randint(1, counts[-1]))
    for pages in (160, 32):
        with Engine(llm, replace(LIMITS, pages=pages), spec=spec) as engine:
            assert [answer.wait() for answer in asked_together(engine, wanted)] == expected
            engine.forget()
            Answer(engine, [5], Params(max_tokens=1)).wait()
        assert engine._scheduler.pages.free == pages
        assert engine._scheduler.preemptions or pages == 160
    assert not calls  # all of it was in packed calls


def test_what_was_answered_is_shared_as_prompts_are(loaded: Any) -> None:
    llm, prompt, params = loaded("shipped"), texts(90)[0], Params(max_tokens=20, ignore_eos=True)
    with Engine(llm, LIMITS) as engine:
        said, _ = Answer(engine, prompt, params).wait()
        again = Answer(engine, [*prompt, *said, 7], params)
        found = again.wait()
    assert again.cached == (len(prompt) + len(said) - 1) // 8 * 8
    with Engine(llm, replace(LIMITS, remembers=False)) as engine:
        assert Answer(engine, [*prompt, *said, 7], params).wait() == found


class Timed:
    """Calls that take ten milliseconds, and one for each row."""

    def __init__(self, gap: float) -> None:
        self.now = 0.0
        self.pace = Pace(gap, clock=lambda: self.now)

    def call(self, answers: int, prompts: int) -> float:
        began = self.now
        self.now += 0.01 + 0.001 * (answers + prompts)
        self.pace.computed(began, answers + prompts)
        return self.now - began


def test_a_call_has_as_many_tokens_of_prompts_as_the_pace_leaves_time_for() -> None:
    timed = Timed(0.065)
    assert timed.pace.tokens(0, 3, 256) == 256  # nobody waits for a token
    timed.call(0, 256)
    timed.call(8, timed.pace.tokens(8, 1, 256))
    count = timed.pace.tokens(8, 1, 256)
    assert (8 + count) % 4 == 0
    assert timed.call(8, count) <= 0.065 < timed.call(8, count + 8)
    assert timed.pace.tokens(8, 1, 32) == 32
    assert Timed(0.0).pace.tokens(8, 1, 256) == 256  # no pace is asked for


def test_prompts_have_their_part_of_the_time_where_answers_take_most_of_it() -> None:
    timed = Timed(0.02)
    timed.call(0, 256)
    step = timed.call(40, 0)
    assert 2 * step - 0.008 <= timed.call(40, timed.pace.tokens(40, 2, 256)) <= 2 * step
    few, many = timed.pace.tokens(40, 2, 256), timed.pace.tokens(40, 6, 256)
    assert many > 1.5 * few


def test_what_calls_take_is_learned_anew_where_a_machine_becomes_slower() -> None:
    timed = Timed(0.065)
    for count in (100, 8, 60, 200, 16) * 4:
        timed.call(0, count)
    assert timed.pace._cost == pytest.approx((0.01, 0.001))
    before = timed.pace.tokens(8, 1, 256)
    for count in (100, 8, 60, 200, 16) * 40:
        timed.call(0, count)
        timed.now += 1.0
        timed.pace.computed(timed.now - 0.03 - 0.003 * count, count)
    assert timed.pace.tokens(8, 1, 256) < before
