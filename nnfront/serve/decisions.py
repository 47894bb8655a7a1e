# SPDX-License-Identifier: Apache-2.0
"""`/v1/decisions`: questions about one input, answered by probabilities of given options and no text.

Options have labels in the prompt, of equal length so that none begins another. What an option weighs is the product of the probabilities of its label's
tokens behind the question, among those of all options. Each option is a request of its own that is made to write its label; what the first has
computed of the input is shared by all others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from math import exp
from string import ascii_uppercase
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from nnfront.engine.params import Params
from nnfront.serve.answers import Answer, Wanted
from nnfront.serve.chat import text_of
from nnfront.serve.failures import Failure
from nnfront.serve.log import Call
from nnfront.serve.protocol import Checked
from nnfront.serve.replies import usage
from nnfront.serve.responses import ResponsesRequest
from nnfront.serve.service import Chunks, Service

MOST_QUESTIONS, MOST_OPTIONS = 400, 255
MOST_WEIGHED = 4096
"""Options of all questions of a request."""


class Option(Checked):
    """One of the choices of a question."""

    value: str | bool
    description: str | None = None


class Level(Checked):
    """One of the levels of a scale, from the lowest."""

    label: str
    description: str | None = None


class _Question(Checked):
    instructions: str | list[dict[str, Any]]
    name: str | None = None

    @property
    def text(self) -> str:
        """What is asked."""
        given = self.instructions
        return given if isinstance(given, str) else "\n".join(text_of(part) for part in given)


class Predicate(_Question):
    """How likely a statement is true."""

    type: Literal["predicate"]

    def labels(self) -> list[str]:
        """What its answers are in the prompt."""
        return ["Yes", "No"]

    def prompt(self) -> str:
        """The question as the model reads it."""
        return f"{self.text}\nIs this true? Answer Yes or No."

    def answer(self, likely: Sequence[float]) -> dict[str, Any]:
        """The reply, by the probability of each label."""
        return {"type": self.type, "name": self.name, "probability": likely[0]}


class _Listed(_Question):
    def options(self) -> list[tuple[str, str | None]]:
        """Each option's text and description."""
        raise NotImplementedError

    def labels(self) -> list[str]:
        """A letter for each, or two where there are more options than letters."""
        count = len(self.options())
        pairs = [a + b for a in ascii_uppercase for b in ascii_uppercase]
        return [*(ascii_uppercase if count <= len(ascii_uppercase) else pairs)][:count]

    def prompt(self) -> str:
        """The question as the model reads it."""
        lines = [
            f"{label}. {text}" + (f": {about}" if about else "")
            for label, (text, about) in zip(self.labels(), self.options(), strict=True)
        ]
        return "\n".join([self.text, *lines, "Answer with the letter alone."])


class Choice(_Listed):
    """Which of some options it is."""

    type: Literal["choice"]
    choices: Annotated[list[Option], Field(min_length=2, max_length=MOST_OPTIONS)]

    def options(self) -> list[tuple[str, str | None]]:
        """Each choice's text and description."""
        written = [(c.value if isinstance(c.value, str) else json.dumps(c.value)) for c in self.choices]
        return [(text, c.description) for text, c in zip(written, self.choices, strict=True)]

    def answer(self, likely: Sequence[float]) -> dict[str, Any]:
        """The reply, by the probability of each label."""
        best = max(range(len(likely)), key=likely.__getitem__)
        return {
            "type": self.type,
            "name": self.name,
            "choice": self.choices[best].value,
            "confidence": likely[best],
            "probabilities": [
                {"value": choice.value, "probability": p}
                for choice, p in zip(self.choices, likely, strict=True)
            ],
        }


class Score(_Listed):
    """Where on a scale it is; levels count from 0."""

    type: Literal["score"]
    levels: Annotated[list[Level], Field(min_length=2, max_length=MOST_OPTIONS)]

    def options(self) -> list[tuple[str, str | None]]:
        """Each level's text and description."""
        return [(level.label, level.description) for level in self.levels]

    def answer(self, likely: Sequence[float]) -> dict[str, Any]:
        """The reply, by the probability of each label."""
        return {
            "type": self.type,
            "name": self.name,
            "score": sum(value * p for value, p in enumerate(likely)),
            "confidence": max(likely),
            "probabilities": [
                {"label": level.label, "value": value, "probability": p}
                for value, (level, p) in enumerate(zip(self.levels, likely, strict=True))
            ],
        }


Question = Annotated[Predicate | Choice | Score, Field(discriminator="type")]


class DecisionRequest(Checked):
    """An input and questions about it."""

    input: str | list[dict[str, Any]]
    questions: Annotated[list[Question], Field(min_length=1, max_length=MOST_QUESTIONS)]
    model: str | None = None
    cache_salt: str | None = None
    # What these ask for is nothing that a server with one model and no accounts does.
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class Forced:
    """What makes an answer be some tokens, one at least."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = [*tokens]
        self.is_over = False

    def allowed(self, vocab: int) -> npt.NDArray[np.uint8]:
        """The next of them alone, as a bit."""
        found = np.zeros(-(-vocab // 8), np.uint8)
        found[self._left[0] // 8] = 1 << self._left[0] % 8
        return found

    def took(self, token: int) -> None:
        """Go on behind a token."""
        self._left.remove(token)
        self.is_over = not self._left

    def forced(self, most: int) -> list[int]:
        """Those that come next, at most so many."""
        return self._left[:most]


async def decide(service: Service, request: DecisionRequest, call: Call) -> Chunks:
    """Yield the reply to a request. Raises Failure and RunError for what is wrong with it, and as answers do."""
    model = service.model(request.model)
    rows = await asyncio.to_thread(_weighed, service, request)
    answers = [answer for row in rows for answer in row]
    call.prompts, call.answers = [len(answer.wanted.prompt) for answer in answers], answers
    weights = iter([await _weight(answers[0]), *await _weights(answers[1:], service)])
    replies = []
    for question, row in zip(request.questions, rows, strict=True):
        logs = [next(weights) for _ in row]
        wide = [exp(log - max(logs)) for log in logs]
        replies.append(question.answer([each / sum(wide) for each in wide]))
    tokens = usage(call.prompts, answers)
    yield {
        "object": "decision",
        "id": f"dec_{call.number}",
        "model": model,
        "answers": replies,
        "usage": {
            "input_tokens": tokens["prompt_tokens"],
            "input_tokens_details": {**tokens["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": tokens["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens["total_tokens"],
        },
    }


def _weighed(service: Service, request: DecisionRequest) -> list[list[Answer]]:
    """An answer to be for each option of each question. Raises Failure for too many, and for choices that are the same."""
    if sum(len(question.labels()) for question in request.questions) > MOST_WEIGHED:
        raise Failure(400, f"the questions have more than {MOST_WEIGHED} options in all", param="questions")
    for question in request.questions:
        if isinstance(question, Choice):
            values = [(type(choice.value), choice.value) for choice in question.choices]
            if len({*values}) < len(values):
                raise Failure(400, "a question has the same choice twice", param="questions")
    messages = ResponsesRequest(input=request.input).chat().messages
    return [_options(service, request, messages, question) for question in request.questions]


def _options(
    service: Service, request: DecisionRequest, messages: list[dict[str, Any]], question: Question
) -> list[Answer]:
    asked = question.prompt()
    if service.template is None:
        context = "\n".join(str(message.get("content") or "") for message in messages)
        text = f"{context}\n\n{asked}\nAnswer: "
    else:
        *before, last = messages
        if last["role"] == "user":  # many templates take no two messages of one role
            asked = f"{last['content']}\n\n{asked}"
        else:
            before = messages
        turns = [*before, {"role": "user", "content": asked}]
        text = service.template.render(turns, add_generation_prompt=True, enable_thinking=False)
    special = service.template is None
    rows = [service.tokenizer.encode(text + label, special=special) for label in question.labels()]
    # A label's first letters may be of one token with what stands before.
    shared = next(i for i, tokens in enumerate(zip(*rows, strict=False)) if len({*tokens}) > 1)
    return [
        Answer(
            service.engine,
            service.tokenizer,
            Wanted(
                row[:shared],
                Params(max_tokens=len(row) - shared, logprobs=0, grammar=Forced(row[shared:])),
                seconds=service.seconds,
                salt=request.cache_salt or "",
                adapter=service.adapter(request.model),
            ),
        )
        for row in rows
    ]


async def _weight(answer: Answer) -> float:
    """The logarithm of how likely an answer is."""
    async with aclosing(answer.pieces()) as pieces:
        return sum([logprobs.token async for piece in pieces for _, logprobs in piece.tokens])


async def _weights(answers: Sequence[Answer], service: Service) -> list[float]:
    """Of many, no more at a time than are computed together: other requests find room beside them."""
    room = asyncio.Semaphore(service.engine.limits.max_num_seqs)

    async def one(answer: Answer) -> float:
        async with room:
            return await _weight(answer)

    tasks = [asyncio.create_task(one(answer)) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
