# SPDX-License-Identifier: Apache-2.0
"""The engine over layers of several kinds: recurrent states, windows, keys and values; each answer is still that of its request alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from answering import Answer, asked_together
from few_of import few_of
from model_folders import random_folder
from serving import LIMITS

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu.extension import NATIVE
from nnfront.distributed.ranks import ALONE
from nnfront.engine.params import Params
from nnfront.engine.pool import Pool
from nnfront.engine.speculate import NGrams
from nnfront.serve.engine import Engine
from nnfront.state.paged import PagedCache

VOCAB, SIZE, HEADS, WINDOW = 40, 16, 2, 6


class Mixed(nn.Module):
    """A sum of all so far, decaying, then attention in a window, then attention to everything."""

    def __init__(self) -> None:
        self.embed = nn.Embedding(VOCAB, SIZE)
        self.qkv = nn.Linear(SIZE, 3 * SIZE, bias=False)
        self.head = nn.Linear(SIZE, VOCAB, bias=False)

    def step(self, tokens: Any, cache: Any) -> Any:
        x = self.embed(tokens)
        batch, seq, _ = x.shape
        before = op.cache_read(cache[0], "sum")
        steps = op.cumsum(x, axis=1) + op.reshape(before, (batch, 1, SIZE))
        op.cache_write(cache[0], "sum", before + op.sum(x, axis=1), seq)
        x = x + op.tanh(steps)
        for layer in (cache[1], cache[2]):
            parts = [
                op.reshape(part, (batch, seq, HEADS, SIZE // HEADS)) for part in op.split(self.qkv(x), 3, -1)
            ]
            x = x + op.reshape(op.attention(*parts, cache=layer), (batch, seq, SIZE))
        return self.head(x)

    def prefill(self, tokens: Any, cache: Any) -> Any:
        return self.step(tokens, cache)[:, -1:]

    def decode(self, tokens: Any, cache: Any) -> Any:
        return self.step(tokens, cache)

    def extend(self, tokens: Any, cache: Any) -> Any:
        return self.step(tokens, cache)


@pytest.fixture(scope="module")
def mixed() -> Any:
    torch.manual_seed(1)
    model = Mixed()
    size = SIZE // HEADS
    kept = spec.Layer(per_sequence={"sum": spec.Tensor([SIZE])})
    cache = spec.State([kept, spec.KV(HEADS, size, window=WINDOW), spec.KV(HEADS, size)])
    ir = model.export(
        {
            "prefill": {"tokens": spec.Tensor(["batch", "seq"], "int64"), "cache": cache},
            "decode": {"tokens": spec.Tensor(["batch", 1], "int64"), "cache": cache},
            "extend": {"tokens": spec.Tensor(["batch", "seq"], "int64"), "cache": cache},
        }
    )
    weights = {
        "embed.weight": torch.randn(VOCAB, SIZE),
        "qkv.weight": torch.randn(3 * SIZE, SIZE) / 4,
        "head.weight": torch.randn(VOCAB, SIZE),
    }
    session = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True)).load(weights)
    config = SimpleNamespace(vocab_size=VOCAB)
    guesser = lambda how, longest: NGrams()  # noqa: E731
    return SimpleNamespace(
        session=session,
        config=config,
        eos_token_ids=(),
        stored_as=None,
        ranks=ALONE,
        guesser=guesser,
        adapters=(),
    )


def test_answers_do_not_depend_on_neighbours_nor_on_pre_emption(
    mixed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, fullest = Pool.apply, []

    def counted(self: Pool, changes: Any) -> None:
        apply(self, changes)
        assert isinstance(self.cache, PagedCache)
        held = [table.pool.pages - table.pool.free for table in self.cache.tables]
        fullest.append(max(held) - engine._scheduler.limits.pages + engine._scheduler.pages.free)

    monkeypatch.setattr(Pool, "apply", counted)
    random = torch.Generator().manual_seed(2)
    wanted = []
    for i in range(14):
        length = int(torch.randint(1, 90, (1,), generator=random))
        prompt = torch.randint(0, VOCAB, (length,), generator=random).tolist()
        wanted.append((prompt, Params(temperature=[0.0, 1.0][i % 2], seed=i, max_tokens=25)))
    wanted.append((wanted[0][0] + wanted[1][0], Params(max_tokens=25)))
    longest = max((prompt for prompt, _ in wanted), key=len)
    wanted += [([*longest, i], Params(max_tokens=25)) for i in range(3)]
    with Engine(mixed, replace(LIMITS, max_num_seqs=1)) as engine:
        assert engine._runner.pool.window == WINDOW
        expected = [Answer(engine, prompt, params).wait() for prompt, params in wanted]
    for limits in (LIMITS, replace(LIMITS, pages=32)):
        with Engine(mixed, limits) as engine:
            answers = asked_together(engine, wanted)
            assert [answer.wait() for answer in answers] == expected
            assert (engine.counts()["preemptions"] > 0) == (limits.pages == 32)
            assert any(answer.cached for answer in answers) or limits.pages == 32
            again = Answer(engine, [*longest, 1], Params(max_tokens=25))
            assert again.wait() == expected[-2]
            assert again.cached >= 64 or limits.pages == 32  # where the window had moved on
            engine.forget()
            assert engine._scheduler.pages.free == limits.pages
    assert max(fullest) <= 1  # the filler's: a pool never holds more pages than were counted


@pytest.mark.skipif(NATIVE is None, reason="products of few rows are the extension's")
@pytest.mark.parametrize(("model_type", "window"), [("gpt_oss", 16), ("gemma4_text", 12)])
def test_what_is_in_a_window_behind_whole_chunks_is_shared_and_answers_stay_the_same(
    tmp_path: Path, model_type: str, window: int
) -> None:
    llm = nn.LLM.load(random_folder(tmp_path / "model", model_type, sliding_window=window))
    stem = torch.randint(2, 90, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    wanted = [([*stem, *range(5, 6 + 9 * i)], Params(max_tokens=12, ignore_eos=True)) for i in range(4)]
    with Engine(llm, replace(LIMITS, remembers=False, max_num_seqs=1)) as engine:
        expected = [Answer(engine, prompt, params).wait() for prompt, params in wanted]
    with Engine(llm, LIMITS) as engine:
        first = Answer(engine, *wanted[0])
        assert first.wait() == expected[0]
        others = asked_together(engine, wanted)
        assert [other.wait() for other in others] == expected
        assert [other.cached for other in others] == [64] * 4


@pytest.mark.parametrize(
    "model_type", few_of(["falcon", "gpt_oss", "deepseek_v3", "mamba2", "mpt", "qwen3_next"], 3)
)
def test_a_long_prompt_in_chunks_gives_what_one_call_gives(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = nn.LLM.load(random_folder(tmp_path / "model", model_type, "float32"))
    random = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, 60, (length,), generator=random) for length in (61, 7, 24)]
    for several in (prompts, prompts[:1]):
        expected = [tokens.tolist() for tokens in llm.generate_ids(several, 12)]
        monkeypatch.setattr(type(llm.session.backend), "prompt_tokens", 8)
        assert [tokens.tolist() for tokens in llm.generate_ids(several, 12)] == expected
        monkeypatch.undo()
