# SPDX-License-Identifier: Apache-2.0
"""Decisions: probabilities of given options against the model's own logits, one prefill of the input, what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai
import pytest
import torch
from answering import Stop
from leaving import leave
from patience import HANGS_SECONDS
from serving import LIMITS, Client

import nnfront as nn
from nnfront.serve.engine import Engine

TEXT = "def area(width, height):\n    return width * height\n"
PREDICATE = {"type": "predicate", "instructions": "This is Python.", "name": "python"}
CHOICE = {
    "type": "choice",
    "instructions": "What is it?",
    "choices": [
        {"value": "a function", "description": "it is called"},
        {"value": True},
        {"value": "true"},
    ],
}
SCORE = {
    "type": "score",
    "instructions": [{"type": "input_text", "text": "How long is it?"}],
    "levels": [{"label": "short"}, {"label": "long"}, {"label": "endless"}],
}
ASKED = [
    (PREDICATE, "This is Python.\nIs this true? Answer Yes or No.", ["Yes", "No"]),
    (
        CHOICE,
        "What is it?\nA. a function: it is called\nB. true\nC. true\nAnswer with the letter alone.",
        ["A", "B", "C"],
    ),
    (
        SCORE,
        "How long is it?\nA. short\nB. long\nC. endless\nAnswer with the letter alone.",
        ["A", "B", "C"],
    ),
]


def expected(llm: nn.LLM, prompt: str, labels: list[str], *, special: bool) -> list[float]:
    """The probability of each label behind a prompt, from the logits of the whole text."""
    logs = []
    rows = [llm.tokenizer.encode(prompt + label, special=special) for label in labels]
    shared = next(i for i in range(len(rows[0])) if len({tuple(row[: i + 1]) for row in rows}) > 1)
    for row in rows:
        likely = llm.logits(torch.tensor([row]))[0].log_softmax(-1)
        logs.append(sum(float(likely[i - 1, row[i]]) for i in range(shared, len(row))))
    found: list[float] = torch.tensor(logs).softmax(0).tolist()
    return found


def ask_openai(client: Client, given: Any, questions: list[Any]) -> Any:
    async def work(http: httpx2.AsyncClient) -> Any:
        api = openai.AsyncOpenAI(base_url="http://server/v1", api_key="k", http_client=http, max_retries=0)
        return await api.decisions.create(model="pylib", input=given, questions=questions)

    return client.run(work)


@pytest.mark.parametrize("has_template", [False, True])
def test_openais_client_gets_the_probabilities_of_the_models_logits(
    engine: Engine, llm: nn.LLM, has_template: bool
) -> None:
    client = Client(engine) if has_template else Client(engine, template=None)
    found = ask_openai(client, TEXT, [question for question, _, _ in ASKED])
    likely = []
    for _, asked, labels in ASKED:
        whole = f"user: {TEXT}\n\n{asked}\nassistant:" if has_template else f"{TEXT}\n\n{asked}\nAnswer: "
        likely.append(expected(llm, whole, labels, special=not has_template))
    predicate, choice, score = found.answers
    assert (predicate.type, predicate.name) == ("predicate", "python")
    assert predicate.probability == pytest.approx(likely[0][0], abs=2e-3)
    assert [each.probability for each in choice.probabilities] == pytest.approx(likely[1], abs=2e-3)
    assert [each.value for each in choice.probabilities] == ["a function", True, "true"]
    best = max(range(3), key=likely[1].__getitem__)
    assert choice.choice == ["a function", True, "true"][best]
    assert choice.confidence == pytest.approx(likely[1][best], abs=2e-3)
    assert [(each.label, each.value) for each in score.probabilities] == [
        ("short", 0),
        ("long", 1),
        ("endless", 2),
    ]
    assert score.score == pytest.approx(likely[2][1] + 2 * likely[2][2], abs=5e-3)
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.model == "pylib"


def test_a_long_input_is_computed_once(engine: Engine, llm: nn.LLM, text: list[int]) -> None:
    given = llm.tokenizer.decode(text[:150])
    found = ask_openai(Client(engine), given, [PREDICATE, PREDICATE, SCORE])
    computed = found.usage.input_tokens - found.usage.input_tokens_details.cached_tokens
    assert found.usage.input_tokens_details.cached_tokens >= 6 * 128  # of seven options
    assert computed < 2 * 150 + 7 * 60
    again = ask_openai(Client(engine), given, [PREDICATE])
    assert again.answers[0].probability == found.answers[0].probability


def test_more_options_than_letters_have_labels_of_two(client: Client) -> None:
    choices = [{"value": f"an option with the number {i}"} for i in range(30)]
    question = {"type": "choice", "instructions": "Which?", "choices": choices}
    reply = client.post("decisions", {"input": "x", "questions": [question]})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("the request does not fit\n")
    question["choices"] = [{"value": str(i)} for i in range(27)]
    reply = client.post("decisions", {"input": "x", "questions": [question]})
    likely = [each["probability"] for each in reply.json()["answers"][0]["probabilities"]]
    assert len(likely) == 27
    assert sum(likely) == pytest.approx(1)


REFUSED = [
    ({"input": "x"}, "the field 'questions' is missing"),
    (
        {"input": "x", "questions": [{"type": "predicate"}]},
        "the field 'instructions' in 'questions' is missing",
    ),
    ({"input": "x", "questions": []}, "questions: List should have at least 1 item after validation, not 0"),
    ({"input": [], "questions": [PREDICATE]}, "the input is empty"),
    (
        {"input": "x", "questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}]},
        "a question has the same choice twice",
    ),
    (
        {"input": "x", "questions": [{**CHOICE, "choices": [{"value": str(i)} for i in range(200)]}] * 21},
        "the questions have more than 4096 options in all",
    ),
    (
        {"input": [{"type": "custom_tool_call"}], "questions": [PREDICATE]},
        "the input has an item of type 'custom_tool_call', which this server does not read",
    ),
    (
        {"input": "x", "questions": [{**PREDICATE, "instructions": [{"type": "input_image"}]}]},
        "a message has a part of type 'input_image', this model reads text only",
    ),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_what_is_wrong_is_said(client: Client, body: dict[str, Any], message: str) -> None:
    response = client.post("decisions", body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message
    assert client.post("decisions", {**body, "model": "y"}).status_code in (400, 404)


def test_a_client_that_leaves_ends_all_its_questions(engine: Engine, client: Client) -> None:
    stop = Stop(engine, 0, lambda: bool(engine._cancelled))

    async def until(_: asyncio.Queue[Any]) -> None:
        while not stop.is_there.is_set():
            await asyncio.sleep(0.001)

    async def work() -> None:
        body = {"input": TEXT * 4, "questions": [SCORE] * 100}
        await leave(client.app, "/v1/decisions", body, until)
        while engine.counts()["running"] or engine.counts()["waiting"]:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(work(), HANGS_SECONDS))
    assert sum(engine.stats.ends.values()) < 300
    engine.forget()
    assert engine._scheduler.pages.free == LIMITS.pages
