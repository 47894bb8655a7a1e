# SPDX-License-Identifier: Apache-2.0
"""Answers that keep to a JSON schema, a regular expression, a list of texts or a grammar: which tokens may come next, worked out by llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeAlias

import llguidance
import numpy as np
import numpy.typing as npt

from nnfront.errors import RunError
from nnfront.files import shown_text
from nnfront.llm.tokenizer import Tokenizer
from nnfront.serve.lark import BLANKS, Form, Lark, short
from nnfront.serve.trial import ROOM_BYTES, SECONDS, Trial

Matcher: TypeAlias = Callable[[], "TokenGrammar"]


class TokenGrammar:
    """Where one answer is in its grammar. What may come next is worked out in another thread while the model computes."""

    def __init__(self, matcher: llguidance.LLMatcher, threads: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._threads = threads
        # The matcher is this thread's only until the other one is asked for what may come next, and after that has answered.
        self.is_over = False
        self._next: Future[bytes] = threads.submit(matcher.compute_bitmask)

    def allowed(self, vocab: int) -> npt.NDArray[np.uint8]:
        """Which of `vocab` tokens may come next, a bit for each."""
        return np.frombuffer(self._next.result(), np.uint8)

    def forced(self, most: int) -> list[int]:
        """Tokens that must come next, at most so many. None while another thread is at work: it is not waited for twice."""
        if self.is_over:
            return []
        self._next.result()  # the matcher is this thread's again
        return list(self._matcher.compute_ff_tokens())[:most]

    def took(self, token: int) -> None:
        """Go on behind a token. Raises RunError where the grammar is too complex to go on."""
        if not self._matcher.consume_token(token):
            raise RunError("the grammar cannot go on", details=[shown_text(self._matcher.get_error())])
        self.is_over = bool(self._matcher.is_stopped())
        if not self.is_over:
            self._next = self._threads.submit(self._matcher.compute_bitmask)


class Grammars:
    """Grammars over the tokens of one tokenizer, each compiled once for all answers of a request."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocab, self._ends = tokenizer, vocab, list(ends)
        self._known: tuple[llguidance.LLTokenizer, Trial] | None = None
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(1, "nnfront-grammar")

    def lark(self) -> Lark:
        """Rules over the tokens of this tokenizer, to be put together."""
        return Lark(self._tokenizer.special())

    def compiled(self, form: Form, before: str = "") -> Matcher:
        """What makes an answer keep to a form; behind what a grammar says that ends with `@answer`, if there is one. Raises RunError for what cannot be compiled."""
        grammars = [form.grammar]
        if before:
            grammars = [{"lark_grammar": before}, {**form.grammar, "name": "answer"}]
        with self._lock:
            if self._known is None:
                made: dict[str, Any] = {
                    "tokenizer": self._tokenizer.json(),
                    "n_vocab": self._vocab,
                    "eos_token": self._ends or None,
                }
                self._known = llguidance.LLTokenizer(**made), Trial(made)
        tokenizer, trial = self._known
        text = json.dumps({"grammars": grammars})
        if not trial.ends(text):
            raise RunError(
                f"{form.what} cannot be compiled",
                details=[f"that takes more than {SECONDS:g} s or {ROOM_BYTES >> 30} GiB"],
            )
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0)
        if matcher.is_error():
            raise RunError(f"{form.what} cannot be compiled", details=[shown_text(matcher.get_error())])
        return lambda: TokenGrammar(matcher.deep_copy(), self._threads)


def json_schema(schema: Any) -> Form:
    """A JSON value that a schema allows. Raises RunError, as the other kinds do, for one that is too long or none."""
    text = short(schema if isinstance(schema, str) else json.dumps(schema))
    try:
        made = llguidance.LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_flexible": True, "whitespace_pattern": BLANKS}
        )
    except ValueError as error:
        raise RunError("the schema cannot be compiled", details=[shown_text(str(error))]) from None
    return Form("the schema", json.loads(made)["grammars"][0])


def regex(expression: str) -> Form:
    """A text that a regular expression matches from its begin to its end."""
    made = llguidance.LLMatcher.grammar_from_regex(short(expression))
    return Form("the regular expression", json.loads(made)["grammars"][0])


def choice(texts: Sequence[str]) -> Form:
    """One of some texts."""
    return Form("the choice", {"lark_grammar": short(f"start: {Lark({}).one_of(texts)}")})


def grammar(text: str) -> Form:
    """A text of a grammar in Lark's form."""
    return Form("the grammar", {"lark_grammar": short(text)})
