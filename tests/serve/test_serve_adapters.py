# SPDX-License-Identifier: Apache-2.0
"""Adapters that are served: each is a model of its own to clients, and rows of different ones are computed together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from answering import Answer, held
from random_adapter import random_adapter
from serving import FOLDER, LIMITS, Client

import nnfront as nn
from nnfront.engine.params import Params
from nnfront.errors import LoadError, RunError
from nnfront.serve.app import app
from nnfront.serve.engine import Engine

PROMPT = "import os\n\n\ndef main(path):\n    return "


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("adapters")
    return {name: random_adapter(made / name, seed, 2 + seed) for seed, name in enumerate("abc")}


@pytest.fixture(scope="module")
def adapted(folders: dict[str, Path]) -> nn.LLM:
    return nn.LLM.load(FOLDER, adapters=folders)


@pytest.fixture
def engine(adapted: nn.LLM) -> Iterator[Engine]:
    with Engine(adapted, LIMITS) as engine:
        yield engine


GREEDY = Params(max_tokens=24, ignore_eos=True)
NAMES = [None, "a", "b", "c", "a", None, "b", "b", "b"]


def asked(engine: Engine, text: list[int]) -> Iterator[Answer]:
    """Greedy answers to beginnings of a text, each with its adapter."""
    for i, name in enumerate(NAMES):
        yield Answer(engine, text[i : 40 + 7 * i], GREEDY, adapter=name)


def test_rows_of_different_adapters_are_answered_as_they_are_alone(adapted: nn.LLM, text: list[int]) -> None:
    with Engine(adapted, LIMITS) as engine:
        alone = [answer.wait() for answer in asked(engine, text)]
        steps = sum(engine.stats.step_tokens.counts)
    with Engine(adapted, LIMITS) as engine:
        with held(engine):
            answers = list(asked(engine, text))
        assert [answer.wait() for answer in answers] == alone
        assert sum(engine.stats.step_tokens.counts) < steps / 2  # they did run together


def test_an_answer_is_that_of_the_merged_model(folders: dict[str, Path], text: list[int]) -> None:
    for name in ("a", "c"):
        merged = nn.LLM.load(FOLDER, dtype="float32", lora=[folders[name]])
        kept = nn.LLM.load(FOLDER, dtype="float32", adapters={name: folders[name]})
        with Engine(kept, LIMITS) as its, Engine(merged, LIMITS) as other:
            found = Answer(its, text[:30], GREEDY, adapter=name).wait()
            assert found == Answer(other, text[:30], GREEDY).wait()


def test_what_was_computed_with_one_adapter_serves_no_other(engine: Engine, text: list[int]) -> None:
    def ask(name: str | None, salt: str = "") -> tuple[list[int], int]:
        answer = Answer(engine, text[:70], GREEDY, adapter=name, salt=salt)
        return answer.wait()[0], answer.cached

    first, second = ask("a"), ask("b")
    assert first[1] == second[1] == ask(None, salt="0 ")[1] == ask(None)[1] == 0
    assert first[0] != second[0]
    assert ask("a") == (first[0], 64)
    assert ask("b") == (second[0], 64)


def test_clients_ask_for_an_adapter_by_its_name(engine: Engine, adapted: nn.LLM) -> None:
    client = Client(engine)
    models = {model["id"]: model for model in client.get("models").json()["data"]}
    assert list(models) == ["pylib", "a", "b", "c"]
    assert models["a"]["parent"] == "pylib"
    assert "parent" not in models["pylib"]
    assert client.get("models/b").json()["id"] == "b"
    texts = {}
    for name in (None, "pylib", "a", "b"):
        reply = client.post(
            "completions", {"model": name, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
        ).json()
        assert reply["model"] == (name or "pylib")
        texts[name] = reply["choices"][0]["text"]
    assert texts[None] == texts["pylib"] == adapted.generate(PROMPT, 16, temperature=0.0)
    assert texts["a"] == adapted.generate(PROMPT, 16, temperature=0.0, adapter="a")
    assert len({texts["pylib"], texts["a"], texts["b"]}) == 3
    chat = {"model": "b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert client.post("chat/completions", chat).json()["model"] == "b"
    assert client.post("responses", {"model": "c", "input": "hello"}).json()["model"] == "c"
    question = {"type": "predicate", "instructions": "It is code."}
    decision = {"model": "a", "input": "import os", "questions": [question]}
    weighed = [client.post("decisions", {**decision, "model": name}).json() for name in ("a", "pylib")]
    assert [each["model"] for each in weighed] == ["a", "pylib"]
    assert weighed[0]["answers"] != weighed[1]["answers"]
    failed = client.post("completions", {"model": "d", "prompt": "x"})
    assert failed.status_code == 404
    assert (
        failed.json()["error"]["message"] == "there is no model 'd', this server has 'pylib', 'a', 'b', 'c'"
    )


def test_an_adapter_that_has_the_models_name_is_refused(engine: Engine) -> None:
    with pytest.raises(LoadError, match="'a' is the name of the model and of an adapter"):
        app(engine, "a")


def test_an_engine_refuses_an_adapter_that_there_is_not(engine: Engine) -> None:
    with pytest.raises(RunError, match=r"there is no adapter 'd'\n.*adapters are 'a', 'b', 'c'"):
        Answer(engine, [1], Params(), adapter="d")
