# SPDX-License-Identifier: Apache-2.0
"""Heads that guess further tokens: they compute what their description says, texts stay what they are, and acceptance is counted."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import Answer, asked_together
from few_of import few_of
from model_folders import random_folder
from safetensors.torch import load_file, save_file
from serving import FOLDER, LIMITS

import nnfront as nn
from nnfront.backends.cpu.extension import NATIVE
from nnfront.cli import main
from nnfront.distributed.ranks import Ranks
from nnfront.engine.multi_token import Heads
from nnfront.engine.params import Params
from nnfront.engine.speculate import Pay
from nnfront.errors import LoadError, RunError
from nnfront.serve.engine import Engine

TYPES = {"deepseek_v3": "model.layers.3", "glm4_moe": "model.layers.3", "qwen3_next": "mtp"}


def with_head(path: Path, model_type: str, dtype: str) -> Path:
    """A folder of a model with a head."""
    return random_folder(path, model_type, dtype, mtp=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def load(model_type: str, dtype: str = "bfloat16") -> nn.LLM:
        path = with_head(tmp_path_factory.mktemp("models") / model_type, model_type, dtype)
        return nn.LLM.load(path, mtp=True)

    return load


def described(path: Path, model_type: str, place: Path) -> Any:
    """What guesses of a text's next tokens, by transformers' layers and the published description: functions of tokens, and of what a head made."""
    from transformers import AutoModelForCausalLM

    head, config = TYPES[model_type], json.loads((path / "config.json").read_text())
    stored = {name: value.float() for name, value in load_file(path / "model.safetensors").items()}
    own = {
        name.removeprefix(f"{head}."): value for name, value in stored.items() if name.startswith(f"{head}.")
    }
    count = config["num_hidden_layers"]
    kinds = {"layer_types": [*config["layer_types"], "full_attention"]} if "layer_types" in config else {}
    block = {f"model.layers.{count}.{name.removeprefix('layers.0.')}": value for name, value in own.items()}
    place.mkdir()
    (place / "config.json").write_text(
        json.dumps({**config, **kinds, "num_hidden_layers": count + 1, "dtype": "float32"})
    )
    save_file(
        {**{n: v for n, v in stored.items() if not n.startswith(head)}, **block}, place / "model.safetensors"
    )
    lm: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    layers = list(lm.model.layers)

    def run(layers: list[Any], norm: Any, **given: torch.Tensor) -> torch.Tensor:
        norm, lm.model.norm = lm.model.norm, norm
        lm.model.layers = torch.nn.ModuleList(layers)
        lm.model.config.num_hidden_layers = len(layers)
        if kinds:
            lm.model.config.layer_types = (
                kinds["layer_types"][-1:] if len(layers) == 1 else kinds["layer_types"][:-1]
            )
        made: torch.Tensor = lm.model(**given, use_cache=False).last_hidden_state
        lm.model.norm = norm
        return made

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        offset = 1.0 if model_type == "qwen3_next" else 0.0
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config_of.rms_norm_eps) * (offset + own[name])
        )

    config_of = lm.config
    names = (
        ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight")
        if model_type == "qwen3_next"
        else ("enorm.weight", "hnorm.weight", "eh_proj.weight")
    )

    def hidden(tokens: torch.Tensor) -> torch.Tensor:
        return run(layers[:-1], lm.model.norm, input_ids=tokens)

    def draft(behind: torch.Tensor, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = lm.model.embed_tokens(behind)
        both = torch.cat([normed(embedded, names[0]), normed(made, names[1])], -1)
        x = run(layers[-1:], torch.nn.Identity(), inputs_embeds=both @ own[names[2]].T)
        if model_type == "qwen3_next":
            x = read = normed(x, "norm.weight")
        else:
            read = normed(x, "shared_head.norm.weight")
        return lm.lm_head(read), x

    return hidden, draft


@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_a_head_computes_what_its_description_says(loaded: Any, model_type: str, tmp_path: Path) -> None:
    session = loaded(model_type, "float32").session
    hidden, draft = described(loaded(model_type, "float32").path, model_type, tmp_path / "reference")
    ids = torch.randint(0, 90, (1, 13), generator=torch.Generator().manual_seed(2))
    cache = session.make_cache("cache", batch=1, max_seq=32)
    _, first = session["prefill_hidden"](ids[:, :9], cache)
    logits, rest = session["extend_hidden"](ids[:, 9:12], cache)
    made, expected = torch.cat([first, rest], 1), hidden(ids[:, :12])
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)
    wanted, further = draft(ids[:, 1:], expected)
    drafted = session.make_cache("drafted", batch=1, max_seq=32)
    for start, stop in ((0, 5), (5, 12)):
        logits, x = session["draft"](ids[:, start + 1 : stop + 1], made[:, start:stop], drafted)
        torch.testing.assert_close(logits, wanted[:, stop - 1 : stop], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(x, further[:, stop - 1 : stop], atol=1e-4, rtol=1e-4)
    token = wanted[:, -1:].argmax(-1)  # and what it made stands in the place of what the model makes
    again, _ = session["draft"](token, x, drafted)
    expected = draft(torch.cat([ids[:, 1:], token], 1), torch.cat([expected, further[:, -1:]], 1))[0]
    torch.testing.assert_close(again, expected[:, -1:], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(NATIVE is None, reason="products of few rows are the extension's")
@pytest.mark.parametrize("model_type", few_of(TYPES))
@pytest.mark.parametrize("pages", few_of([40, 160]))
def test_texts_are_the_same_with_a_head(
    loaded: Any, model_type: str, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, random_ = loaded(model_type), random.Random(pages)
    start = [random_.randrange(90) for _ in range(70)]
    wanted = [
        (
            [
                *start[: random_.choice([0, 40, 70])],
                *(random_.randrange(90) for _ in range(random_.randint(1, 30))),
            ],
            Params(temperature=random_.choice([0.0, 0.8]), seed=i, max_tokens=random_.randint(1, 25)),
        )
        for i in range(9)
    ]
    monkeypatch.setattr(Pay, "is_due", lambda self, cost: True)
    with Engine(llm, replace(LIMITS, remembers=False)) as engine:
        expected = [Answer(engine, prompt, params).wait() for prompt, params in wanted]
    with Engine(llm, replace(LIMITS, pages=pages), spec="mtp:3") as engine:
        answers = asked_together(engine, wanted)
        assert [answer.wait() for answer in answers] == expected
        assert engine.counts()["drafted"] > 20


def knowing(path: Path) -> Path:
    """A model whose layers add nothing, so that a token says the next; and a head that passes the embedding on."""
    path = with_head(path, "glm4_moe", "bfloat16")
    stored = load_file(path / "model.safetensors")
    for name, value in stored.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
        elif name.endswith(("enorm.weight", "norm.weight")) and "self_attn" not in name:
            value.fill_(1)
    size = stored["lm_head.weight"].shape[1]
    stored["model.layers.3.eh_proj.weight"] = torch.eye(size, 2 * size, dtype=torch.bfloat16)
    save_file(stored, path / "model.safetensors")
    return path


@pytest.mark.parametrize("count", [1, 4])
def test_what_a_head_guesses_right_is_accepted_and_counted(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pay, "is_due", lambda self, cost: True)
    llm = nn.LLM.load(knowing(tmp_path / "model"), mtp=True)
    with Engine(llm, LIMITS, spec=f"mtp:{count}") as engine:
        Answer(engine, [5, 6, 7], Params(max_tokens=1 + 4 * (1 + count))).wait()
        counts = engine.counts()
    assert counts["accepted"] == counts["drafted"] == 4 * count


def test_a_head_guesses_for_all_texts_of_a_batch_in_one_call_each_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rights, rows, random_ = [], [], random.Random(1)
    guess, call = Heads.guess, Heads._call

    def sometimes_wrong(self: Heads, wishes: Any) -> dict[int, list[int]]:
        rows.append([])
        found = guess(self, wishes)
        rights.append([random_.random() < 0.7 for _ in found])
        return {
            number: tokens if is_right else [0] * len(tokens)
            for (number, tokens), is_right in zip(found.items(), rights[-1], strict=True)
        }

    def counted(self: Heads, given: Any, *more: Any) -> None:
        rows[-1].append(len(given))
        call(self, given, *more)

    monkeypatch.setattr(Pay, "is_due", lambda self, cost: True)
    monkeypatch.setattr(Heads, "guess", sometimes_wrong)
    monkeypatch.setattr(Heads, "_call", counted)
    llm = nn.LLM.load(knowing(tmp_path / "model"), mtp=True)
    prompts = [[*range(5, 9 + i)] for i in range(4)]
    expected = [row.tolist() for row in llm.generate_ids([torch.tensor(p) for p in prompts], 41)]
    limits = replace(LIMITS, step_tokens=256)
    with Engine(llm, limits, spec="mtp:3") as engine:
        answers = asked_together(engine, [(p, Params(max_tokens=41, ignore_eos=True)) for p in prompts])
        assert [answer.wait()[0] for answer in answers] == expected
        counts = engine.counts()
    assert len({sum(each) for each in rights}) > 2  # texts had different numbers of tokens to be told of
    together = [calls for calls in rows if calls and calls[0] == 4]
    assert len(together) > 5  # steps in which all four were guessed for
    assert max(map(len, together)) <= 3  # a call for each token, whatever each text lacked
    assert counts["accepted"] > counts["drafted"] / 3


def test_a_head_sees_all_chunks_of_a_prompt(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, guess = [], Heads.guess

    def watched(self: Heads, wishes: Any) -> dict[int, list[int]]:
        seen.extend((wish.head.first, sorted(wish.head.made)) for wish in wishes.values())
        return guess(self, wishes)

    monkeypatch.setattr(Heads, "guess", watched)
    with Engine(loaded("glm4_moe"), LIMITS, spec="mtp") as engine:
        Answer(engine, [*range(2, 75)], Params(max_tokens=3, ignore_eos=True)).wait()
    assert seen[0] == (0, [*range(73)])


def test_a_guess_that_fails_is_an_error_of_who_runs_and_the_engine_goes_on(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Heads, "guess", lambda self, wishes: 1 / 0)
    with Engine(loaded("glm4_moe"), LIMITS, spec="mtp") as engine:
        params = Params(max_tokens=4, ignore_eos=True)
        assert Answer(engine, [3, 4], params).wait()[1] == "errordivision by zero"
        monkeypatch.undo()
        assert len(Answer(engine, [3, 4], params).wait()[0]) == 4


def test_an_artefact_keeps_a_head_that_is_asked_for(loaded: Any, tmp_path: Path) -> None:
    llm, out = loaded("qwen3_next"), tmp_path / "made"
    assert main(["export", str(llm.path), "-o", str(out), "--mtp"]) == 0
    made, prompt = nn.LLM.load(out), torch.arange(1, 20)
    assert torch.equal(made.generate_ids([prompt], 15, spec="mtp")[0], llm.generate_ids([prompt], 15)[0])
    assert made.guesser("mtp:2", 60).count == 2


def test_where_there_is_no_head_none_is_promised(loaded: Any, tmp_path: Path) -> None:
    shipped = FOLDER
    with pytest.raises(
        LoadError,
        match=r"(?s)^there is no head of llama that guesses further tokens\n  file: .*llama.py, which has no 'build_mtp'\n  help: guess in another way: --spec ngram",
    ):
        nn.LLM.load(shipped, mtp=True)
    plain = random_folder(tmp_path / "plain", "glm4_moe")
    with pytest.raises(
        LoadError,
        match=r"^the checkpoint has no head that guesses further tokens\n  none of its \d+ tensors begins with 'model.layers.3.'\n  help: ",
    ):
        nn.LLM.load(plain, mtp=True)
    with pytest.raises(
        RunError,
        match=r"^tokens cannot be guessed by the model's own head: it was loaded without one\n  methods are 'logits', .*\n  help: LLM.load\(DIR, mtp=True\), or nnfront export DIR --mtp",
    ):
        nn.LLM.load(plain, extends=True).generate_ids([torch.tensor([1])], 2, spec="mtp")
    with pytest.raises(
        RunError, match=r"^'mtp:9' does not say how many tokens to guess\n  help: mtp, or mtp:1 to mtp:7$"
    ):
        loaded("glm4_moe").guesser("mtp:9", 10)


def test_a_server_of_several_ranks_guesses_in_other_ways(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = loaded("deepseek_v3")
    monkeypatch.setattr(llm, "ranks", Ranks(0, 2))
    with pytest.raises(RunError) as error:
        Engine(llm, LIMITS, spec="mtp")
    assert str(error.value) == (
        "a server that ranks divide guesses no tokens by the model's own head\n"
        "  help: guess with --spec ngram or draft:DIR, or leave out --tp"
    )
