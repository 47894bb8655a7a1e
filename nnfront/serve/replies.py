# SPDX-License-Identifier: Apache-2.0
"""Replies as data, in the shapes of OpenAI's API: whole ones, and the chunks of streams."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from nnfront.engine.draw import Logprobs
from nnfront.llm.tokenizer import Tokenizer
from nnfront.serve.answers import Answer, Piece
from nnfront.serve.calls import Call
from nnfront.serve.sections import Kind, Sections

Drawn = Sequence[tuple[int, Logprobs]]


class Head:
    """What all chunks of one reply have: its id, when it was made, the model."""

    def __init__(self, kind: str, number: str, model: str) -> None:
        self.kind, self.id, self.model = kind, number, model
        self.created = int(time.time())

    def reply(self, choices: list[dict[str, Any]], *, is_chunk: bool, **more: Any) -> dict[str, Any]:
        """A reply, or one chunk of it."""
        return {
            "id": self.id,
            "object": self.kind + (".chunk" if is_chunk and self.kind == "chat.completion" else ""),
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def usage(prompts: Sequence[int], answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of the prompts, each counted once however many answers it has, and of the answers."""
    prompt, completion = sum(prompts), sum(answer.tokens for answer in answers)
    per_prompt = max(len(answers) // max(len(prompts), 1), 1)
    cached = sum(answer.cached for answer in answers[::per_prompt])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_message(sections: Sequence[tuple[Kind, str | Call]]) -> tuple[dict[str, Any], int]:
    """An assistant's message of some sections, and how many calls are in it."""

    def text(kind: Kind) -> str:
        return "".join(value for found, value in sections if found == kind and isinstance(value, str))

    calls = [value.entry() for _, value in sections if isinstance(value, Call)]
    content, reasoning = text("content"), text("reasoning").strip()
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message, len(calls)


class ChatStream:
    """One answer of a chat as deltas: its role first and once, then sections as they come, at last why it ends."""

    def __init__(self, sections: Sections) -> None:
        self._sections = sections
        self._has_begun = False
        self._calls = 0
        self._drawn: list[tuple[int, Logprobs]] = []

    def push(self, piece: Piece) -> Iterator[tuple[dict[str, Any], Drawn, str | None]]:
        """Yield deltas, the tokens whose log probabilities go with each, and the reason of the end with the last."""
        if not self._has_begun:
            self._has_begun = True
            yield {"role": "assistant", "content": ""}, (), None
        self._drawn += piece.tokens
        for kind, value in self._sections.push(piece.text, is_last=piece.finish is not None):
            drawn, self._drawn = self._drawn, []
            if isinstance(value, Call):
                entry = value.entry(self._calls)
                arguments, entry["function"]["arguments"] = entry["function"]["arguments"], ""
                yield {"tool_calls": [entry]}, drawn, None
                rest = {"index": self._calls, "function": {"arguments": arguments}}
                yield {"tool_calls": [rest]}, (), None
                self._calls += 1
            else:
                yield {"reasoning_content" if kind == "reasoning" else "content": value}, drawn, None
        if piece.finish is not None:
            finish = "tool_calls" if self._calls and piece.finish == "stop" else piece.finish
            yield {}, self._drawn, finish


def chat_logprobs(tokenizer: Tokenizer, drawn: Drawn) -> dict[str, Any]:
    """Log probabilities as chat completions give them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token], special=True)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}

    content = [
        {
            **entry(token, found.token),
            "top_logprobs": [entry(other, logprob) for other, logprob in found.top],
        }
        for token, found in drawn
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, drawn: Drawn, offset: int) -> dict[str, Any]:
    """Log probabilities as completions give them; `offset` is where the text of the first token begins."""
    tokens = [tokenizer.decode([token], special=True) for token, _ in drawn]
    offsets = [offset]
    for text in tokens[:-1]:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": tokens,
        "token_logprobs": [found.token for _, found in drawn],
        "top_logprobs": [
            {tokenizer.decode([other], special=True): logprob for other, logprob in found.top}
            for _, found in drawn
        ],
        "text_offset": offsets[: len(tokens)],
    }
