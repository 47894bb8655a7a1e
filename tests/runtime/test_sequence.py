# SPDX-License-Identifier: Apache-2.0
"""Kernels in C as one call: bit for bit what they compute one by one, wherever they can be, and the steps of torch wherever not."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from few_of import few_of
from hypothesis import given, settings
from hypothesis import strategies as st
from nnfront_models import llama, qwen3_moe

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu import in_c
from nnfront.backends.cpu import tape as sequence
from nnfront.backends.cpu import tape_builder as writers
from nnfront.backends.cpu.extension import NATIVE
from nnfront.errors import RunError
from nnfront.session import Session

pytestmark = pytest.mark.skipif(NATIVE is None, reason="no kernels in C")

CHECKPOINT = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"
BASE = dataclasses.replace(
    llama.TINY, dtype="bfloat16", hidden_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32
)
CONFIGS = {
    "grouped": BASE,
    "all heads, tied": dataclasses.replace(BASE, num_key_value_heads=4, tie_word_embeddings=True),
    "biases": dataclasses.replace(BASE, attention_bias=True, mlp_bias=True),
    "another head size": dataclasses.replace(BASE, head_dim=64, num_key_value_heads=1),
}


class Recorder:
    """Stands for the extension and notes how many rows each sequence has."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(NATIVE, name)

    def run_sequence(self, rows: torch.Tensor, *memories: Any) -> None:
        if len(rows) > 1:  # not a kernel by itself
            self.rows.append(len(rows))
        NATIVE.run_sequence(rows, *memories)


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(writers, "NATIVE", recorder)
    return recorder


def stepwise(load: Callable[[], Session]) -> Session:
    """A session that runs its instructions one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "NATIVE", None)
        return load()


def language_model(
    config: llama.Config, windows: Sequence[int | None] | None = None
) -> Callable[[], Session]:
    torch.manual_seed(0)
    file = qwen3_moe if isinstance(config, qwen3_moe.Config) else llama
    model = file.build(config)
    weights = {name: (torch.randn(p.shape) * 0.1).bfloat16() for name, p in model.named_parameters()}
    methods = file.export_spec(config)
    if windows:
        cache = spec.Cache(
            config.num_hidden_layers, config.kv_heads, config.head_size, config.dtype, window=list(windows)
        )
        methods = {name: {**methods[name], "cache": cache} for name in ("prefill", "decode")}
        methods = {
            name: {**args, "tokens": spec.Tensor(["batch", "n"], "int64")} for name, args in methods.items()
        }
    ir = nn.passes.lift_transform_params(model.export(methods), shared_transform=True)
    executable = nn.compile(ir)
    return lambda: executable.load(weights)


def decoded(session: Session, lengths: list[int], count: int, max_seq: int = 32) -> list[torch.Tensor]:
    """The logits of prompts of several lengths, and of tokens after them."""
    cache = session.make_cache(batch=len(lengths), max_seq=max_seq)
    found = [
        session["prefill"]((torch.arange(n)[None] + 7 * i) % 259, cache.rows(i))[:, -1:]
        for i, n in enumerate(lengths)
    ]
    found = [torch.cat(found)]
    tokens = torch.arange(len(lengths))[:, None]
    return found + [session["decode"](tokens + step, cache) for step in range(count)]


def calls(config: llama.Config, recorder: Recorder, prompt: int, layers: int = 2) -> tuple[int, int]:
    """How many calls of C a prompt of so many tokens takes in so many layers, and how many a token after it."""
    session = language_model(dataclasses.replace(config, num_hidden_layers=layers))()
    cache = session.make_cache(batch=1, max_seq=32)
    counts = [len(recorder.rows)]
    for method, tokens in ("prefill", torch.arange(prompt)), ("decode", torch.tensor([7])):
        session[method](tokens[None], cache)
        counts.append(len(recorder.rows))
    return counts[1] - counts[0], counts[2] - counts[1]


@pytest.mark.parametrize("lengths", few_of([[1], [3, 8], [1, 2] * 20, [5], [2] * 8], 2), ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_decodes_bit_for_bit_as_one_by_one(name, lengths, recorder):
    load = language_model(CONFIGS[name])
    got = decoded(load(), lengths, 6)
    assert recorder.rows
    expected = decoded(stepwise(load), lengths, 6)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not torch.equal(got[-1], torch.zeros_like(got[-1]))


@pytest.mark.parametrize("lengths", [[1], [5], [3, 8], [2] * 8], ids=str)
def test_norms_of_heads_are_in_it(lengths, recorder):
    config = dataclasses.replace(qwen3_moe.TINY, dtype="bfloat16", head_dim=32, mlp_only_layers=(0, 1, 2, 3))
    load = language_model(config)
    got = decoded(load(), lengths, 6)
    expected = decoded(stepwise(load), lengths, 6)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert calls(config, recorder, 1, 4) == calls(config, recorder, 1, 2)


@pytest.mark.parametrize("tokens", [9, 20])
def test_all_layers_of_a_prompt_are_one_call(tokens, recorder):
    config = dataclasses.replace(BASE, num_hidden_layers=3)
    load = language_model(config)
    got = decoded(load(), [tokens], 1)
    assert calls(config, recorder, tokens, 5)[0] == calls(config, recorder, tokens, 4)[0]
    assert all(torch.equal(a, b) for a, b in zip(got, decoded(stepwise(load), [tokens], 1), strict=True))


@pytest.mark.parametrize("quant", few_of(["int4", "int8", "fp8"]))
def test_a_quantised_model_decodes_bit_for_bit_as_one_by_one(quant, recorder):
    def load() -> Session:
        return nn.LLM.load(CHECKPOINT, quant=quant).session

    got = decoded(load(), [3, 8], 4)
    assert recorder.rows[-1] > 8
    assert all(torch.equal(a, b) for a, b in zip(got, decoded(stepwise(load), [3, 8], 4), strict=True))


def test_all_layers_of_a_token_and_of_a_few_are_one_call(recorder):
    assert calls(BASE, recorder, 4, 5) == calls(BASE, recorder, 4, 2)
    assert calls(BASE, recorder, 20, 5)[0] == calls(BASE, recorder, 4, 5)[0]


def test_layers_share_the_memory_of_what_is_between_them(recorder):
    def size(layers: int) -> int:
        session = language_model(dataclasses.replace(BASE, num_hidden_layers=layers))()
        decoded(session, [4], 1)
        steps = session["decode"]._route.code.steps
        plan = [*[s for s in steps if isinstance(s, sequence.TapeStep)][-1].plans.values()][-1]
        return max(part.tape.size for part in plan if isinstance(part, sequence.TapePart))

    assert size(2) == size(9) > 0


@pytest.mark.parametrize("rows", [65, 80])
def test_many_rows_are_one_call(rows, recorder):
    load = language_model(BASE)
    got = decoded(load(), [1] * rows, 2)
    steps = 2  # besides the prompts, of one token each: slices for their last one divide what is one call in a step
    assert recorder.rows.count(26) == steps
    assert len(recorder.rows) == 2 * rows + steps
    assert all(torch.equal(a, b) for a, b in zip(got, decoded(stepwise(load), [1] * rows, 2), strict=True))


def test_a_window_is_seen_after_newer_tokens_lie_over_older_ones(recorder):
    load = language_model(BASE, [6, None])
    got = decoded(load(), [3, 9], 12)
    assert all(torch.equal(a, b) for a, b in zip(got, decoded(stepwise(load), [3, 9], 12), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_c, "NATIVE", None)
        by_torch = decoded(stepwise(load), [3, 9], 12)
    wide = decoded(stepwise(language_model(BASE)), [3, 9], 12)
    for a, b in zip(got, by_torch, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.02 * b.abs().max().item())
    assert (got[-1] - wide[-1]).abs().max() > 0.1 * wide[-1].abs().max()  # the window matters here


def test_a_full_cache_is_refused_and_stays_as_it_was(recorder):
    session = language_model(BASE)()
    cache = session.make_cache(batch=1, max_seq=4)
    session["prefill"](torch.arange(3)[None], cache)
    session["decode"](torch.tensor([[5]]), cache)
    with pytest.raises(RunError, match="cache is full"):
        session["decode"](torch.tensor([[6]]), cache)
    assert cache.lengths == [4]
    cache.truncate(3)
    assert session["decode"](torch.tensor([[5]]), cache).isfinite().all()


@pytest.mark.parametrize("options", [{"page_size": 4}, {"stored_as": "float8_e4m3fn"}], ids=str)
def test_other_caches_go_another_way(options, recorder):
    load = language_model(BASE)

    def run(session: Session) -> torch.Tensor:
        cache = session.make_cache(batch=1, max_seq=16, **options)
        session["prefill"](torch.arange(5)[None], cache)
        return session["decode"](torch.tensor([[5]]), cache)

    assert torch.equal(run(load()), run(stepwise(load)))


def test_threads_may_change_and_run_at_once(recorder):
    load = language_model(BASE)
    session, expected = load(), decoded(stepwise(load), [3, 8], 6)
    results: dict[int, list[torch.Tensor]] = {}

    def run(i: int) -> None:
        results[i] = decoded(session, [3, 8], 6)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        run(-1)
    finally:
        torch.set_num_threads(before)
    workers = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 5
    for found in results.values():
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_weights_that_change_are_read_from_where_they_are(recorder):
    session = Chain.load([("linear", 8), ("linear", 8), ("linear", 8)], 16)
    x = torch.randn(1, 1, 16).bfloat16()
    (before,) = session["forward"](x)
    session.update({f"parts.{i}.weight": torch.zeros(8, 8).bfloat16() for i in (1, 2)})
    (after,) = session["forward"](x)
    assert len(recorder.rows) == 2
    assert before.any()
    assert not (after - session.weights["parts.2.bias"]).any()


def test_a_weight_that_has_shrunk_is_not_read_beyond_its_end(recorder):
    session = Chain.load([("linear", 8), ("linear", 8), ("linear", 8)], 16)
    x = torch.randn(1, 1, 16).bfloat16()
    session["forward"](x)
    session.weights["parts.1.weight"].resize_(4, 8)
    with pytest.raises(RunError) as caught:
        session["forward"](x)
    assert caught.value.what == "a call failed with ValueError: multiply: weight has 64 bytes, 128 are needed"
    assert caught.value.where == "method 'forward'"
    assert len(recorder.rows) == 2


class Chain(nn.Module):
    """Layers in a row, each with what it is: its kind, and how wide its result is where that is free."""

    def __init__(self, kinds: list[tuple[str, int]], width: int, keeps: frozenset[int]) -> None:
        self.kinds, self.keeps = kinds, keeps
        self.parts = []
        for kind, wide in kinds:
            if kind == "norm":
                self.parts.append(nn.RMSNorm(width, bias=False))
            elif kind == "gate":
                self.parts.append(nn.Linear(width, 2 * wide, bias=wide % 2 == 0))
            elif kind == "residual":
                self.parts.append(nn.Linear(width, width, bias=wide % 2 == 0))
            else:
                self.parts.append(nn.Linear(width, wide, bias=wide % 2 == 0))
            width = wide if kind in ("gate", "linear") else width

    def forward(self, x: nn.Tensor) -> Any:
        kept = []
        for i, (part, (kind, _)) in enumerate(zip(self.parts, self.kinds, strict=True)):
            if kind == "gate":
                gate, up = op.split(part(x), 2, -1)
                x = op.silu(gate) * up
            elif kind == "residual":
                x = x + part(x)
            else:
                x = part(x)
            if kind == "linear" and x.shape[-1] % 4 == 0:
                x = op.reshape(x, (x.shape[0], x.shape[1], 4, x.shape[2] // 4))
                x = op.reshape(x, (x.shape[0], x.shape[1], x.shape[2] * x.shape[3]))
            if i in self.keeps:  # as it is, or a view of it, which others read again
                view = op.reshape(x, (x.shape[0], x.shape[1], 1, x.shape[2]))
                if i % 3 == 1:
                    x = op.reshape(view, (x.shape[0], x.shape[1], x.shape[2]))
                    kept.append(op.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 1)))
                else:
                    kept.append(view if i % 2 else x)
        return (x, *kept)

    @staticmethod
    def load(kinds: list[tuple[str, int]], width: int, keeps: frozenset[int] = frozenset()) -> Session:
        torch.manual_seed(0)
        model = Chain(kinds, width, keeps).to("bfloat16")
        ir = model.export({"forward": {"x": spec.Tensor(["batch", "seq", width], "bfloat16")}})
        weights = {name: torch.randn(p.shape).bfloat16() for name, p in model.named_parameters()}
        return nn.compile(ir).load(weights)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_chains_of_any_layers_give_the_same_bits_and_read_nothing_that_was_not_written(data: st.DataObject):
    kind = st.sampled_from(["linear", "gate", "norm", "residual"])
    kinds = data.draw(st.lists(st.tuples(kind, st.integers(1, 40)), min_size=2, max_size=7))
    keeps = data.draw(st.frozensets(st.integers(0, len(kinds) - 1)))
    batch, seq, width = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 70)),
    )
    session = Chain.load(kinds, width, keeps)
    expected = stepwise(lambda: Chain.load(kinds, width, keeps))
    with pytest.MonkeyPatch.context() as patch:
        empty = torch.empty

        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = empty(*args, **kwargs)
            return made.fill_(0xFF if made.dtype == torch.uint8 else torch.nan)

        patch.setattr(torch, "empty", poisoned)
        for strided in (False, True):
            x = torch.randn(batch, seq, 2 * width).bfloat16()
            x = x[..., ::2] if strided else x[..., :width].contiguous()
            for a, b in zip(session["forward"](x), expected["forward"](x), strict=True):
                assert torch.equal(a, b)
                assert a.isfinite().all()


@pytest.mark.parametrize("keeps", [{0, 4}, {0, 3, 4}, {1, 4}, {0, 5}], ids=str)
def test_views_that_are_read_before_and_after_one_that_others_see_are_there(keeps):
    kinds = [("linear", 3)] * 6
    expected = stepwise(lambda: Chain.load(kinds, 3, frozenset(keeps)))
    x = torch.randn(1, 2, 3).bfloat16()
    found = Chain.load(kinds, 3, frozenset(keeps))["forward"](x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected["forward"](x), strict=True))


def test_without_the_extension_there_are_no_sequences():
    session = stepwise(lambda: Chain.load([("linear", 8), ("linear", 8)], 16))
    route = session["forward"]._route
    steps = (*route.code.steps, *route.last.steps)
    assert len(steps) >= 2
    assert not any(isinstance(step, sequence.TapeStep) for step in steps)


def test_nan_is_looked_for_between_all_instructions(monkeypatch, recorder):
    monkeypatch.setenv("NNFRONT_CHECK_NAN", "1")
    session = Chain.load([("linear", 8), ("linear", 8)], 16)
    with pytest.raises(RunError, match="linear made a NaN"):
        session["forward"](torch.full((1, 1, 16), 3e38).bfloat16())
    assert not recorder.rows


def test_memory_is_given_to_the_next_value_when_its_last_holder_is_gone():
    writer = writers.TapeBuilder(1, {})
    first = writer.make(0, (100,))
    writer.hold(first.place)
    writer.release(first.place)
    second = writer.make(1, (100,))
    writer.release(first.place)
    third = writer.make(2, (90,))
    assert writer.arena.place() == 2 * 256
    assert first.place.piece.offset == third.place.piece.offset != second.place.piece.offset
    empty = writers.TapeBuilder(1, {})
    one, two = empty.take(0), empty.take(0)
    empty.arena.place()
    assert one.piece.offset != two.piece.offset


def test_a_sequence_stops_at_a_kernel_that_refuses():
    ones, y = torch.ones(4).bfloat16(), torch.zeros(8)
    writer = writers.TapeBuilder(1, {})
    x, nothing = writers.Place(1), writers.NOWHERE
    writer.call("norm", 1, 4, 0, 0, 0, 1, 1e-6, x, nothing, nothing, x, nothing, writers.Place(2))
    writer.call("multiply", 0, 4, 1, 1, 4, 1, 1, x, x, nothing, nothing, nothing, writers.Place(2, 16))
    writer.call("norm", 1, 4, 0, 0, 0, 1, 1e-6, x, nothing, nothing, x, nothing, writers.Place(2, 16))
    rows = torch.tensor(writer.rows, dtype=torch.int64)
    with pytest.raises(ValueError, match="1 row or more, got 0"):
        NATIVE.run_sequence(rows, None, ones, y)
    assert y.view(torch.bfloat16)[:4].tolist() == [1.0] * 4
    assert not y.view(torch.bfloat16)[4:].any()
