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

MAX_CHARACTERS = 1 << 16
"""Of a schema, an expression or a grammar."""
BLANKS = r"(\n[ ]{0,40})|[ ]?"
"""Between the parts of JSON: a blank, or a new line and its indent. Some models would never end a run of blanks."""
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
        self._known: llguidance.LLTokenizer | None = None
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(1, "nnfront-grammar")

    def json_schema(self, schema: Any) -> Matcher:
        """A JSON value that a schema allows. Raises RunError, as the other kinds do, for what cannot be compiled."""
        return self._compiled(
            "the schema",
            lambda: llguidance.LLMatcher.grammar_from_json_schema(
                _written(schema), overrides={"whitespace_flexible": True, "whitespace_pattern": BLANKS}
            ),
        )

    def regex(self, expression: str) -> Matcher:
        """A text that a regular expression matches from its begin to its end."""
        return self._compiled(
            "the regular expression", lambda: llguidance.LLMatcher.grammar_from_regex(_short(expression))
        )

    def choice(self, texts: Sequence[str]) -> Matcher:
        """One of some texts."""
        written = " | ".join(json.dumps(text) for text in texts)
        return self._compiled(
            "the choice", lambda: llguidance.LLMatcher.grammar_from_lark(_short(f"start: {written}"))
        )

    def lark(self, grammar: str) -> Matcher:
        """A text of a grammar in Lark's form."""
        return self._compiled("the grammar", lambda: llguidance.LLMatcher.grammar_from_lark(_short(grammar)))

    def _compiled(self, what: str, make: Callable[[], str]) -> Matcher:
        with self._lock:
            if self._known is None:
                self._known = llguidance.LLTokenizer(
                    self._tokenizer.json(), n_vocab=self._vocab, eos_token=self._ends or None
                )
        known = self._known
        try:
            grammar = make()
        except ValueError as error:
            raise RunError(f"{what} cannot be compiled", details=[shown_text(str(error))]) from None
        matcher = llguidance.LLMatcher(known, grammar, log_level=0)
        if matcher.is_error():
            raise RunError(f"{what} cannot be compiled", details=[shown_text(matcher.get_error())])
        return lambda: TokenGrammar(matcher.deep_copy(), self._threads)


def json_rule(schema: Any) -> str:
    """What a rule in Lark's form says of a JSON value that a schema allows."""
    guided = {**schema, "x-guidance": {"whitespace_pattern": BLANKS}} if isinstance(schema, dict) else schema
    return f"%json {json.dumps(guided)}"


def _written(schema: Any) -> str:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return _short(text)


def _short(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise RunError(
            f"a grammar has {len(text)} characters, {MAX_CHARACTERS} are the most",
            help="ask for less, or check the answer afterwards",
        )
    return text
