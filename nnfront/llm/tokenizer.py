# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back, with the tokenizer.json of a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nnfront.errors import LoadError, RunError


class Tokenizer:
    """The tokenizer of a folder. Needs the package `tokenizers`, which the extra `llm` installs."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise LoadError(
                "the package 'tokenizers' is not installed", help="pip install 'nnfront[llm]'"
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception for whatever is wrong with the file
            raise LoadError(f"{path} is not a tokenizer", details=[str(error)]) from None
        # What a file may say for training in batches; a prompt is given whole and alone.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, how in added.items() if how.special}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that the tokenizer adds. Raises RunError if it has none for it."""
        try:
            ids: list[int] = self._tokenizer.encode(text).ids
        except Exception as error:  # as above
            raise RunError("the tokenizer cannot encode this text", details=[str(error)]) from None
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield pieces of text as tokens come, which together are what `decode` gives for all of them.

        A character that spans tokens comes when it is whole; what is still none at the end comes as `decode` has it.
        """
        seen: list[int] = []
        # The tokens from `settled` on are decoded again, since a decoder may treat the first one in its own way;
        # the text of those before `given` has been yielded.
        settled = given = 0
        text = ""
        for token in ids:
            if token in self._special:
                continue
            seen.append(token)
            before, now = self.decode(seen[settled:given]), self.decode(seen[settled:])
            if now.endswith(UNKNOWN) or self._is_byte(token) or not now.startswith(before):
                continue
            if piece := now.removeprefix(before):
                settled, given = given, len(seen)
                text += piece
                yield piece
        whole = self.decode(seen)
        if len(whole) > len(text):
            yield whole[len(text) :]

    def _is_byte(self, token: int) -> bool:
        """Whether a token is one byte of a character that the vocabulary lacks: a run of them is decoded as one."""
        return BYTE.fullmatch(self._tokenizer.id_to_token(token) or "") is not None


UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What a decoder puts for bytes that are no character, or not yet."""

BYTE = re.compile("<0x[0-9A-F]{2}>")


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield text up to the first of the stop strings, which itself is not part of it.

    What might be the beginning of a stop string is held back until it is clear that it is not.
    """
    pending = ""
    for piece in pieces:
        pending += piece
        found = [at for at in (pending.find(stop) for stop in stops) if at >= 0]
        if found:
            if min(found):
                yield pending[: min(found)]
            return
        keep = max((_overlap(pending, stop) for stop in stops), default=0)
        ready, pending = pending[: len(pending) - keep], pending[len(pending) - keep :]
        if ready:
            yield ready
    if pending:
        yield pending


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
