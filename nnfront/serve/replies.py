# SPDX-License-Identifier: Apache-2.0
"""Replies as data, in the shapes of OpenAI's API: whole ones, and the chunks of streams."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from nnfront.llm.tokenizer import Tokenizer
from nnfront.serve.answers import Answer
from nnfront.serve.draw import Logprobs

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
