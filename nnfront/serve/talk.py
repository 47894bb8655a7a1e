# SPDX-License-Identifier: Apache-2.0
"""A conversation with a model, turn by turn, in one process."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nnfront.engine.params import Params
from nnfront.engine.runner import Event
from nnfront.errors import RunError
from nnfront.llm.prompts import adapter_numbers
from nnfront.llm.tokenizer import TextStream
from nnfront.serve.chat import ChatTemplate
from nnfront.serve.engine import Engine


@dataclass
class Talk:
    """What has been said, and how answers are chosen. An answer that is left early stays in it as far as it came."""

    engine: Engine
    template: ChatTemplate
    params: Params
    system: str | None = None
    adapter: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, text: str) -> Iterator[str]:
        """Say something; yield the answer as it comes."""
        self.turns.append({"role": "user", "content": text})
        return self._answer()

    def again(self) -> Iterator[str]:
        """Answer what was said last once more. Raises RunError if nothing was."""
        if self.turns and self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        if not self.turns:
            raise RunError("there is nothing to answer")
        return self._answer()

    def undo(self) -> None:
        """Forget what was said last, and its answer. Raises RunError if nothing was."""
        if not self.turns:
            raise RunError("there is nothing to take back")
        while self.turns and self.turns.pop()["role"] != "user":
            pass

    def use(self, adapter: str | None) -> None:
        """Let an adapter answer from now on; None: the model as it is. Raises RunError for one that there is not."""
        adapter_numbers(self.engine.llm.adapters, adapter, 1)
        self.adapter = adapter

    def set(self, name: str, value: str) -> None:
        """Change a parameter of how answers are chosen. Raises RunError for one that there is not, and for a value out of range."""
        kinds = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "seed": int}
        kinds |= {"repetition_penalty": float, "max_tokens": int}
        if name not in kinds:
            raise RunError(f"there is no parameter {name!r}", help=f"there are {', '.join(kinds)}")
        try:
            found: Any = None if value == "none" else kinds[name](value)
        except ValueError:
            raise RunError(f"{name} is {value!r}, expected a number or none") from None
        changed: dict[str, Any] = {name: found}
        self.params = replace(self.params, **changed)

    def _answer(self) -> Iterator[str]:
        before = [{"role": "system", "content": self.system}] if self.system else []
        tokenizer = self.engine.llm.tokenizer
        prompt = tokenizer.encode(self.template.render([*before, *self.turns]), special=False)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        number = self.engine.submit(prompt, self.params, events.put, adapter=self.adapter)
        text, said, finish = TextStream(tokenizer), "", None
        self.turns.append({"role": "assistant", "content": ""})
        try:
            while finish is None:
                event = events.get()
                finish = event.finish
                piece = "" if event.token is None else text.push(event.token)
                piece += text.end() if finish is not None else ""
                said += piece
                self.turns[-1]["content"] = said
                if finish == "error":
                    raise RunError(event.error)
                if piece:
                    yield piece
        finally:
            if finish is None:
                self.engine.cancel(number)
