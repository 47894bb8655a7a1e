# SPDX-License-Identifier: Apache-2.0
"""How well a language model predicts a text: bits per byte and perplexity, over windows that slide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nnfront.errors import RunError
from nnfront.llm.language_model import LLM

WINDOW = 1024
"""Tokens in a window, where the context holds as many: the logits of a window are in memory together."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`nats`: the sum of -log p of the `predicted` tokens, which are `text_bytes` bytes of the text's `tokens` tokens in UTF-8."""

    nats: float
    predicted: int
    tokens: int
    text_bytes: int
    window: int
    stride: int

    @property
    def perplexity(self) -> float:
        """exp of the mean of -log p."""
        return math.exp(self.nats / self.predicted)

    @property
    def bits_per_byte(self) -> float:
        """The bits that the predicted tokens take, for each byte of their text: comparable where tokenizers differ."""
        return self.nats / math.log(2) / self.text_bytes


def evaluate(
    llm: LLM,
    text: str,
    window: int | None = None,
    stride: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Predict a text, each token but the first from those before it.

    window: tokens that the model sees at once; `WINDOW`, or the context if that is less. stride: how far it moves, half of it by
    default: each window predicts the tokens that none before it has, so that a token has `window - stride` before it or all there are.
    progress: told how many tokens of how many are done. Raises RunError for a text of fewer than two tokens, and for a window or stride
    out of range.
    """
    limit = llm.context
    window = min(WINDOW, limit) if window is None else window
    stride = max(window // 2, 1) if stride is None else stride
    for name, value, most in (("window", window, limit), ("stride", stride, window - 1)):
        if type(value) is not int or not 1 + (name == "window") <= value <= most:
            raise RunError(
                f"{name} is {value!r}, expected an int from {1 + (name == 'window')} to {most}",
                help=f"the model's context holds {limit} tokens, and a stride is less than its window",
            )
    ids = torch.tensor(llm.tokenizer.encode(text), dtype=torch.int64)
    if len(ids) < 2:
        raise RunError(f"the text has {len(ids)} tokens, at least 2 are needed to predict one")
    nats = 0.0
    for first, seen, stop in _windows(len(ids), window, stride):
        logits = llm.logits(ids[None, first:stop])[0, seen - first - 1 : -1]
        targets = ids[seen:stop].to(logits.device)
        nats += float(torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum"))
        if progress is not None:
            progress(stop, len(ids))
    # A token that begins every text, as many tokenizers have it, is no part of this one.
    size = len(text.encode()) - len(llm.tokenizer.decode(ids[:1].tolist()).encode())
    return Evaluation(nats, len(ids) - 1, len(ids), size, window, stride)


def _windows(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield where a window begins, the first token that it is to predict, and where it ends."""
    first, seen = 0, 1
    while seen < tokens:
        stop = min(first + window, tokens)
        yield first, seen, stop
        first, seen = first + stride, stop
